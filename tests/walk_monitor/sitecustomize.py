"""Loaded by Python itself at the start of every process that has this folder on PYTHONPATH: notes each call of a function
of the project, and writes the notes to the folder WALK_NOTES when the process ends.

A line is: time.monotonic_ns(), thread, what (start or return), file, function. `sys.monitoring` (PEP 669) costs a call only
where it is wanted, so the walk is seen at nearly its usual speed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = os.environ.get("WALK_ROOT", "")
FOLDERS = tuple(f"{ROOT}/{stage}/" for stage in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels"))
notes: list[tuple[int, int, str, str, str]] = []


def note(what: str, code: CodeType) -> Any:
    if not code.co_filename.startswith(FOLDERS):
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]
    notes.append((time.monotonic_ns(), threading.get_ident(), what, code.co_filename, code.co_qualname))
    return None


def write() -> None:
    modules = "\n".join(sorted(sys.modules))
    folder = Path(os.environ["WALK_NOTES"])
    (folder / f"{os.getpid()}.modules").write_text(modules)
    (folder / f"{os.getpid()}.notes").write_text("\n".join("\t".join(map(str, each)) for each in notes))


if ROOT and sys.version_info >= (3, 12):
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.PROFILER_ID, "walk")
    events = monitoring.events
    monitoring.register_callback(monitoring.PROFILER_ID, events.PY_START, lambda code, _: note("start", code))
    monitoring.register_callback(monitoring.PROFILER_ID, events.PY_RETURN, lambda code, _, __: note("return", code))
    monitoring.set_events(monitoring.PROFILER_ID, events.PY_START | events.PY_RETURN)
    atexit.register(write)
elif ROOT:

    def profile(frame: Any, event: str, _: Any) -> None:
        """Python 3.11 has no sys.monitoring."""
        if event in ("call", "return") and frame.f_code.co_filename.startswith(FOLDERS):
            note("start" if event == "call" else "return", frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    atexit.register(write)
