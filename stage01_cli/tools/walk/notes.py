"""What the monitor wrote when the processes of a server ended: which functions ran, when, and in which order."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MONITOR = Path(__file__).resolve().parent / "monitor"
WINDOW = "window"  # the file whose one byte numbers the part of the run


@dataclass(frozen=True)
class Function:
    """A function of ours, or the body of a class or a module."""

    file: str  # from the project's root
    name: str  # qualified, as in Scheduler.schedule
    line: int  # the first, decorators included
    last: int  # with the functions inside it
    is_function: bool

    @property
    def is_named(self) -> bool:
        """False for modules, classes, lambdas and comprehensions."""
        return self.is_function and not self.name.rpartition(".")[2].startswith("<")


@dataclass(frozen=True)
class Note:
    """One call of a function (start), its continuation after an await (resume), the wait (pause), or its return."""

    time: int  # time.monotonic_ns()
    thread: str
    what: str
    function: Function
    words: dict[str, str] | str | None  # of a start the arguments, of a return the result; None: said before


@dataclass(frozen=True)
class Process:
    """What was noted in one process."""

    pid: int
    notes: list[Note]  # in order of time
    lines: dict[int, dict[Function, list[int]]]  # part of the run -> the lines that were executed
    modules: list[str]


def monitored(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server whose processes write their notes to the folder when they end."""
    (folder / WINDOW).write_bytes(b"\0")
    search = os.pathsep.join(filter(None, [str(MONITOR), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": search, "WALK_ROOT": str(ROOT), "WALK_NOTES": str(folder)}


def begin_window(folder: Path, number: int) -> None:
    """From now on another part of the run is noted. Each process reads this byte at its next call."""
    with (folder / WINDOW).open("r+b") as file:
        file.write(bytes([number]))


def read_notes(folder: Path) -> list[Process]:
    """The processes that have ended."""
    return [_process(path) for path in sorted(folder.glob("*.json"))]


def _process(path: Path) -> Process:
    data = json.loads(path.read_text(encoding="utf-8"))
    functions = [Function(file, name, line, last, bool(own)) for file, name, line, last, own in data["codes"]]
    names: Counter[str] = Counter()
    threads: dict[int, str] = {}
    for number, name in data["threads"].items():
        names[name] += 1
        threads[int(number)] = name if names[name] == 1 else f"{name} #{names[name]}"
    notes = [Note(time, threads[thread], what, functions[at], words) for time, thread, what, at, words in data["notes"]]
    notes.sort(key=lambda note: note.time)  # stable: a thread's own notes keep their order
    lines = {
        int(window): {functions[int(code)]: numbers for code, numbers in of_code.items()}
        for window, of_code in data["lines"].items()
    }
    return Process(int(path.stem), notes, lines, data["modules"])
