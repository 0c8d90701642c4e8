"""An exercise's judge in a browser: what the page's worker asks of Python. The tests are those of `stages course check`, in one process.

Ending what never ends is the page's part: it ends the worker. What Pyodide has not, and no judge looks at, is stood in for.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

WORK = Path("/work")
BROKEN = 'broken: "'  # how the verdict on a sentence of the contract begins
ABSENT = ("tokenizers", "fastapi", "opentelemetry", "uvicorn")
"""Packages that the judged modules import and the judges never call. The first has no wheel for a browser."""


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has every name, for each of ABSENT."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Whatever is below one of them."""
        absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module of nothing but stand-ins."""
        return mock.MagicMock(name=spec.name, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _NothingArrives:
    """A selector without sockets: between two callbacks a loop can only wait for its next timer."""

    def select(self, timeout: float | None) -> list[Any]:
        """Nothing, after so many seconds; a loop that waits for ever does so until the page ends it."""
        time.sleep(0.1 if timeout is None else timeout)
        return []


class _Loop(asyncio.BaseEventLoop):
    """An event loop of callbacks and timers. Pyodide's own one lets nobody wait for it in the middle of a function."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NothingArrives()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No other thread wakes it."""


def run(main: Coroutine[Any, Any, Any], **_: Any) -> Any:
    """As asyncio.run, inside of a function that Pyodide's loop calls."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = _Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
        asyncio._set_running_loop(outer)


def settle_in() -> None:
    """Once, in Pyodide, before the page hears that Python is ready. The two imports take seconds."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    sys.meta_path.insert(0, StandIns())
    sys.dont_write_bytecode = True
    asyncio.run = run
    sys.prefix = f"/lib/python3.{sys.version_info[1]}"  # Pyodide says "/", below which the project lies, too
    for name in ("thread_time", "thread_time_ns"):
        if not hasattr(time, name):
            setattr(time, name, getattr(time, name.replace("thread", "process")))


class Told:
    """A plugin of pytest: the lines that the judge writes go to a list, and each is told as it comes."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._tell = tell

    def pytest_configure(self, config: Any) -> None:
        """Stand where `--verdicts` puts its pipe."""
        for plugin in config.pluginmanager.get_plugins():
            if hasattr(plugin, "WRITE"):
                config.stash[plugin.WRITE] = self._write

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._tell(json.dumps(line))


def check(name: str, code: str, tell: Callable[[str], Any]) -> dict[str, Any]:
    """Judge a text as the file of an exercise.

    Returns `outcome`, the `text` and, if the verdict has them, the broken `sentence` of the contract and the `line` of the text; `tests`
    that have run of `collected`; and `spoiled`, if the text may have changed what others wrote, so that Python should be loaded anew.
    """
    import pytest

    from stage01_cli.tools.course.exercises import ROOT, find
    from stage01_cli.tools.course.own import problem
    from stage01_cli.tools.course.verdict import Verdict, printable, read

    exercise = find(name)
    WORK.mkdir(exist_ok=True)
    solution = exercise.solution(WORK)
    solution.write_text(code, encoding="utf-8")
    told, printed = Told(tell), StringIO()
    if found := problem(exercise, solution):
        verdict: Verdict | None = Verdict(*found)
    else:
        quiet = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "addopts="]
        judged = [
            str(exercise.judge),
            "--rootdir",
            str(ROOT),
            "--exercise",
            str(exercise.number),
            "--impl",
            str(solution),
        ]
        with redirect_stdout(printed), redirect_stderr(printed):
            pytest.main([*judged, *quiet], plugins=[told])
        verdict = read(told.lines, WORK / "no-stack", solution, 0) if told.lines else None
    if verdict is None or (verdict.passed and not verdict.num_tests):
        verdict = Verdict("error", f"the judge could not run:\n{printable(printed.getvalue()[-1500:])}")
    quoted = [key for key, each in exercise.contract.items() if f'{BROKEN}{each}"' in verdict.text]
    return {
        "outcome": verdict.outcome, "text": verdict.text, "sentence": quoted[0] if quoted else None,
        "line": last_line(verdict.text), "tests": verdict.num_tests, "collected": verdict.num_collected,
        "spoiled": verdict.outcome in ("rejected", "error") and bool(told.lines) and BROKEN not in verdict.text,
    }  # fmt: skip


def last_line(text: str) -> int | None:
    """The number behind the last `line` of a verdict."""
    pairs = pairwise(word.strip("(),.:;") for word in text.split())
    return next((int(word) for before, word in reversed([*pairs]) if before == "line" and word.isdecimal()), None)


def answer(question: str) -> str:
    """`{"check": the exercise's name, "code": ...}`."""
    asked = json.loads(question)
    from this_page import tell  # worker.js makes it

    return json.dumps(check(asked["check"], asked["code"], tell))


if sys.platform == "emscripten":
    settle_in()
