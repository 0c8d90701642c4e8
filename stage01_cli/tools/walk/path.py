"""The path of a run: from notes and trace events to one row per function, in the order in which the run entered them."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path as FilePath

from stage01_cli.tools.walk.notes import ROOT, Function, Note, Process
from stage01_cli.tools.walk.run import REQUEST_ID, Run
from stagetrace.event import Event

PHASES_OF = {
    "stage01_cli": {1, 2}, "stage02_server": {2, 3, 6, 9}, "stage03_engine/frontend": {4, 7, 9},
    "stage03_engine/core": {5, 7, 8, 9}, "stage04_kernels": {5, 8},
}  # fmt: skip
"""Folder -> the phases that live there, as in the table of the project's README. A file elsewhere serves any phase."""
ANY = set(range(1, 10))


@dataclass(eq=False)
class Row:
    """One function on the path."""

    function: Function
    process: str  # as in the trace: APIServer, EngineCore_DP0
    thread: str  # that of its first call
    at: int  # nanoseconds from the beginning of the run to its first entry
    caller: Row | None
    phase: int = 0
    calls: int = 0  # 0: it was running already, and went on
    arguments: dict[str, str] = field(default_factory=dict)  # of its first call
    result: str = ""
    events: list[Event] = field(default_factory=list)  # that it emitted
    lines: set[int] = field(default_factory=set)  # that were executed

    @property
    def lane(self) -> tuple[str, str]:
        """Process and thread."""
        return self.process, self.thread

    @property
    def room(self) -> str:
        """`features/hardening` of a function that plugs in, nothing of one that is on the walk."""
        _, features, below = self.function.file.partition("/features/")
        return features[1:] + below.partition("/")[0].removesuffix(".py")


@dataclass
class Path:
    """The path of one run."""

    rows: list[Row]  # by phase, and within a phase by lane
    lines: dict[str, set[int]]  # file -> lines that were executed
    events: list[Event]
    took: int  # nanoseconds


def _time(one: Note | Event) -> int:
    return one.ts if isinstance(one, Event) else one.time


class _Lane:
    """One thread of one process: which functions are running, and when it emitted events of which phase."""

    def __init__(self) -> None:
        self.stack: list[Function] = []
        self.events: list[tuple[int, int]] = []  # time, phase


class _Reader:
    """Goes through the notes and the events of one process."""

    def __init__(self, process: Process, name: str, run: Run, window: int) -> None:
        self.process, self.name, (self.begin, self.end) = process, name, run.windows[window]
        self.lines = process.lines.get(window, {})
        self.lanes: dict[str, _Lane] = defaultdict(_Lane)
        self.rows: dict[Function, Row] = {}

    def read(self, events: Iterable[Event]) -> None:
        """Notes and events, merged by time."""
        both: Iterator[Note | Event] = merge(self.process.notes, events, key=_time)
        for one in both:
            if isinstance(one, Event):
                self._event(one)
            else:
                self._note(one)
        for row in self.rows.values():  # a caller before what it calls
            row.lines.update(self.lines.get(row.function, ()))
            row.phase = self._phase(row)

    def _note(self, note: Note) -> None:
        lane = self.lanes[note.thread]
        if note.what in ("start", "resume"):
            lane.stack.append(note.function)
            if self.begin <= note.time <= self.end:
                self._enter(note, lane)
        elif lane.stack:
            lane.stack.pop()
            row = self.rows.get(note.function)
            if row is not None and isinstance(note.words, str):
                row.result = row.result or note.words

    def _enter(self, note: Note, lane: _Lane) -> None:
        """The function, and before it those that wait for it and were called earlier."""
        caller = None
        for function in filter(lambda one: one.is_named, lane.stack):
            if function not in self.rows:
                self.rows[function] = Row(function, self.name, note.thread, note.time - self.begin, caller)
            caller = self.rows[function]
        row = self.rows.get(note.function)
        if row is not None and note.what == "start":
            row.calls += 1
            if isinstance(note.words, dict):
                row.arguments = row.arguments or note.words

    def _event(self, event: Event) -> None:
        """Give it to the function that emitted it: of those that are running, the one whose lines hold the call."""
        if not (event.phase and self.begin <= event.ts <= self.end):
            return
        file, _, line = event.src.rpartition(":")
        for lane in self.lanes.values():
            for function in reversed(lane.stack):
                if function.file.rpartition("/")[2] == file and function.line <= int(line) <= function.last:
                    lane.events.append((event.ts, event.phase))
                    if function in self.rows:
                        self.rows[function].events.append(event)
                    return

    def _phase(self, row: Row) -> int:
        """That of its own first event; else of the next event in its thread. Where the function's folder knows no such phase, it
        helps its caller."""
        if row.events:
            return row.events[0].phase
        home = next((phases for folder, phases in PHASES_OF.items() if row.function.file.startswith(f"{folder}/")), ANY)
        everywhere = sorted(one for lane in self.lanes.values() for one in lane.events)
        for events in (self.lanes[row.thread].events, everywhere):
            later = events[bisect_left(events, (self.begin + row.at, 0)) :] or events[-1:]
            if later and later[0][1] not in home and row.caller is not None:
                return row.caller.phase
            if fitting := [phase for _, phase in later if phase in home]:
                return fitting[0]
        return row.caller.phase if row.caller is not None else 0


def path_of(run: Run, window: int) -> Path:
    """The functions that a part of a run entered: its START, or its REQUEST."""
    names = {event.pid: event.proc for event in run.events}
    rows: list[Row] = []
    lines: dict[str, set[int]] = defaultdict(set)
    for process in run.processes:
        reader = _Reader(process, names.get(process.pid, "helper"), run, window)
        reader.read(event for event in run.events if event.pid == process.pid)
        rows += [row for row in reader.rows.values() if row.calls or row.lines]  # others only wait for what they called
        for function, numbers in reader.lines.items():
            lines[function.file].update(numbers)
    strange = _of_this_machine(run.events)
    for row in rows:
        row.arguments = {name: _neutral(text, strange) for name, text in row.arguments.items()}
        row.result = _neutral(row.result, strange)
    files = {row.function.file for row in rows}
    begin, end = run.windows[window]
    shown = [event for event in run.events if begin <= event.ts <= end]
    return Path(_in_order(rows), {file: lines[file] for file in sorted(files)}, shown, end - begin)


def _in_order(rows: list[Row]) -> list[Row]:
    """By phase, then by lane in the order of their first events, then by first entry: two threads that run at the same time do not
    alternate line by line."""
    begins: dict[tuple[int, tuple[str, str]], tuple[bool, int]] = {}
    for row in rows:
        key, first = (row.phase, row.lane), (not row.events, row.events[0].ts if row.events else row.at)
        begins[key] = min(begins.get(key, first), first)
    # sorted is stable, and a caller was entered before what it calls
    return sorted(rows, key=lambda row: (row.phase, begins[row.phase, row.lane], row.lane, row.at))


def _of_this_machine(events: list[Event]) -> list[str]:
    """What another run, or another machine, would have put differently: folders, and what the server adds to the id that the client
    gave, `-1f0c2a77` of `cmpl-walk-1f0c2a77-0`."""
    begin = f"cmpl-{REQUEST_ID}"
    ids = (event.req for event in events if event.req is not None and event.req.startswith(begin))
    chance = next((one.removeprefix(begin).rpartition("-")[0] for one in ids), "")
    return [f"{ROOT}/", f"{tempfile.gettempdir()}/", f"{FilePath.home()}/", *filter(None, [chance])]


def _neutral(text: str, strange: list[str]) -> str:
    for part in strange:
        text = text.replace(part, "")
    return text
