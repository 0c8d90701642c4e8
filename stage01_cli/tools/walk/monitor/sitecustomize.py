"""Notes which functions of the project a process enters, with what, and which lines it executes. Loaded by Python itself at the start
of every process that has this folder on PYTHONPATH, so the engine's process is seen too.

It needs only the standard library, and is off unless the environment names two folders: WALK_ROOT, the project, and WALK_NOTES,
where `PID.json` is written when the process ends. One byte of the file `window` there says in which part of the run we are (the
walk's own process counts it up); without that file there is one part. WALK_PARENT is the process without which the first one ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import mmap
import opcode
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.environ.get("WALK_ROOT", "")
FOLDERS = tuple(f"{ROOT}/{stage}/" for stage in ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels"))
MAX_NOTES = 400_000  # of one process: half a minute of decoding
LONGEST = 80  # characters of one argument
SHOWN_TEXTS = ("id", "_id", "path", "method", "backend")  # ends of the names of arguments whose text says who or where
SHOWN_LISTS = ("block", "row", "request", "shape", "size", "len", "visible")  # parts of names: lists without tokens
HIDDEN_NUMBERS = ("token", "token_id", "seed")  # what a client wrote or got, or what chance gives
COUNTS = ("num_", "total_num_")  # beginnings of the attributes that say how much an object holds
PR_SET_PDEATHSIG = 1  # of prctl(2)
CO_OPTIMIZED = 1  # inspect.CO_OPTIMIZED, without importing that
YIELD_VALUE = opcode.opmap["YIELD_VALUE"]
TYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool"}


def describe(name: str, value: Any) -> str:
    """A value in a few words: numbers as they are, shapes of tensors, lengths of collections, never the text of a client."""
    kind = type(value).__name__
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if value is None or isinstance(value, bool | int | float):
        return kind if name in HIDDEN_NUMBERS else repr(value)[:LONGEST]
    if isinstance(value, str):
        return repr(value[:LONGEST]) if name.endswith(SHOWN_TEXTS) else f"str[{len(value)}]"
    if isinstance(value, list | tuple) and 0 < len(value) <= 8 and all(type(one) is int for one in value):
        return repr(value)[:LONGEST] if any(part in name for part in SHOWN_LISTS) else f"{kind}[{len(value)}]"
    if isinstance(value, bytes | bytearray | list | tuple | dict | set | frozenset):
        return f"{kind}[{len(value)}]"
    try:
        return _shape(value) or f"{kind}({', '.join(_counts(value))})"[:LONGEST].replace("()", "")
    except Exception:  # whatever an object does when it is asked: the server must not notice
        return kind


def _shape(value: Any) -> str:
    """f32[3, 768] of a tensor of torch or numpy, else nothing."""
    if not type(value).__module__.startswith(("torch", "numpy")) or not hasattr(value, "shape"):
        return ""
    return f"{_short(str(value.dtype))}{list(value.shape)}"[:LONGEST]


def _short(dtype: str) -> str:
    """torch.float32 -> f32"""
    word = dtype.rpartition(".")[2]
    letters = word.rstrip("0123456789")
    return TYPES.get(letters, letters) + word[len(letters) :]


def _counts(value: Any) -> list[str]:
    """The id of an object of ours, and how much it holds; its properties are not computed."""
    if not type(value).__module__.startswith("stage0"):
        return []
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dict__", None) or ()
    found = [str(value.request_id)] if "request_id" in names else []
    numbers = [(name, getattr(value, name, None)) for name in names if name.startswith(COUNTS)]
    return found + [f"{name}={number}" for name, number in numbers if type(number) is int and number][:2]


def arguments(frame: FrameType) -> dict[str, str]:
    """What a function was called with, less itself."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = frame.f_locals
    return {name: describe(name, values[name]) for name in names if name in values and name not in ("self", "cls")}


class Notes:
    """What was seen in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[tuple[int, int, str, int, Any]] = []  # time, thread, what, code, arguments or result
        self.codes: dict[CodeType, int] = {}
        self.threads: dict[int, str] = {}
        self.described: set[tuple[str, int, CodeType]] = set()
        self.lines: dict[tuple[int, CodeType], set[int]] = defaultdict(set)
        window = folder / "window"
        self.window: Any = b"\0"
        if window.exists():
            with window.open("rb") as file:
                self.window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)

    def add(self, what: str, code: CodeType, words: Callable[[], Any] = lambda: None) -> None:
        """One call (start), the continuation of a coroutine (resume), or the return or pause of a call. Of a function's calls in
        one part of the run, the first has its `words`: what it was called with, or what it returned."""
        if len(self.notes) == MAX_NOTES:
            return
        thread = threading.get_native_id()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        first = (what, self.window[0], code)
        said = None if first in self.described else words()
        self.described.add(first)
        self.notes.append((time.monotonic_ns(), thread, what, self.codes.setdefault(code, len(self.codes)), said))

    def line(self, code: CodeType, line: int) -> None:
        """A line was executed in this part of the run."""
        self.lines[self.window[0], code].add(line)

    def write(self) -> None:
        """Called when the process ends."""
        lines: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for (window, code), numbers in list(self.lines.items()):
            lines[window][self.codes.setdefault(code, len(self.codes))] = sorted(numbers)
        codes = [
            (
                code.co_filename[len(ROOT) + 1 :],
                code.co_qualname,
                code.co_firstlineno,
                last_line(code),
                is_function(code),
            )
            for code in self.codes
        ]
        text = {
            "threads": self.threads, "codes": codes, "notes": self.notes, "lines": lines, "modules": sorted(sys.modules),
        }  # fmt: skip
        unfinished = self.folder / f"{os.getpid()}.part"  # whoever reads finds whole files only
        unfinished.write_text(json.dumps(text), encoding="utf-8")
        unfinished.replace(unfinished.with_suffix(".json"))


def is_function(code: CodeType) -> bool:
    """Not the body of a class or a module."""
    return bool(code.co_flags & CO_OPTIMIZED)


def last_line(code: CodeType) -> int:
    """Of the function, with the functions inside it."""
    inside = [last_line(const) for const in code.co_consts if isinstance(const, CodeType)]
    return max([code.co_firstlineno, *inside, *(line for _, _, line in code.co_lines() if line)])


def is_ours(code: CodeType) -> bool:
    """A function, class body or module of a stage; this file lies in one too."""
    return code.co_filename.startswith(FOLDERS) and not code.co_filename.startswith(HERE)


class Monitoring:
    """Python 3.12 and later: `sys.monitoring` (PEP 669) costs a call only where it is wanted."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.seen = notes, notes.window[0]
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        self.disable, self.restart = monitoring.DISABLE, monitoring.restart_events
        tool, events = monitoring.PROFILER_ID, monitoring.events
        monitoring.use_tool_id(tool, "walk")
        callbacks = {
            events.PY_START: self.start, events.PY_RETURN: self.end, events.LINE: self.line,
            events.PY_RESUME: lambda code, _: self.move("resume", code),
            events.PY_YIELD: lambda code, _, __: self.move("pause", code),
            events.PY_UNWIND: lambda code, _, __: self.unwind(code),
        }  # fmt: skip
        for event, callback in callbacks.items():
            monitoring.register_callback(tool, event, callback)
        monitoring.set_events(tool, sum(callbacks))

    def start(self, code: CodeType, _: int) -> Any:
        if not is_ours(code):
            return self.disable
        if self.notes.window[0] != self.seen:  # lines that were seen before count again
            self.seen = self.notes.window[0]
            self.restart()
        frame = sys._getframe(1)
        self.notes.add("start", code, lambda: arguments(frame))
        return None

    def end(self, code: CodeType, _: int, result: object) -> Any:
        if not is_ours(code):
            return self.disable
        self.notes.add("return", code, lambda: describe("result", result))
        return None

    def move(self, what: str, code: CodeType) -> Any:
        if not is_ours(code):
            return self.disable
        self.notes.add(what, code)
        return None

    def unwind(self, code: CodeType) -> None:
        if is_ours(code):  # this event cannot be switched off for one place
            self.notes.add("return", code)

    def line(self, code: CodeType, line: int) -> Any:
        if is_ours(code):
            self.notes.line(code, line)
        return self.disable


class Tracing:
    """Python 3.11: `sys.settrace`, which is asked at every call, and in functions of ours at every line."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        threading.settrace(self.call)
        sys.settrace(self.call)

    def call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if event != "call" or not is_ours(code):
            return None
        if code.co_code[frame.f_lasti + 1] & 3 == 0:  # of the instruction RESUME: else it is after a yield or an await
            self.notes.add("start", code, lambda: arguments(frame))
        else:
            self.notes.add("resume", code)
        return self.inside

    def inside(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            self.notes.line(frame.f_code, frame.f_lineno)
        elif event == "return" and frame.f_code.co_code[frame.f_lasti] == YIELD_VALUE:
            self.notes.add("pause", frame.f_code)
        elif event == "return":
            self.notes.add("return", frame.f_code, lambda: describe("result", value))
        return self.inside


def run_hidden() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    search = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", search)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def end_with(parent: int) -> None:
    """Let the system ask this process to end when its parent is gone, however that ended (Linux only)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


run_hidden()
if "WALK_PARENT" in os.environ:  # taken out: the processes that this one starts end with it anyway
    end_with(int(os.environ.pop("WALK_PARENT")))
if ROOT and os.environ.get("WALK_NOTES"):
    _notes = Notes(Path(os.environ["WALK_NOTES"]))
    atexit.register(_notes.write)
    Monitoring(_notes) if sys.version_info >= (3, 12) else Tracing(_notes)
