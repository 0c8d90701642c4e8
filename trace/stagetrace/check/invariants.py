"""Is a recording consistent, and what is missing from it? `check(directory)` reads it once, in bounded memory.

The rules are in `invariant_rules.py`. This module collects what they find, finds out which processes were killed, and which
findings that explains: a killed process loses its last events and leaves its requests unfinished.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from stagetrace.event import Event, decode_line
from stagetrace.read.lanes import Lanes
from stagetrace.read.reader import Recording


@dataclass
class Finding:
    """One thing that is not as it should be. `count` events show it; the first one is in the text."""

    text: str
    excuses: frozenset[int] | None  # processes whose death would explain it; None: the death of any process
    count: int = 1
    last: str = ""  # the last event that shows it
    explained: str = ""  # by which death

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more like it, up to {self.last})" if self.count > 1 else ""
        return self.text + more + (f" [explained: {self.explained}]" if self.explained else "")


@dataclass
class Report:
    """What `check` found out."""

    findings: list[Finding] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    events: int = 0
    processes: dict[int, str] = field(default_factory=dict)  # pid -> name
    left_out: dict[str, object] = field(default_factory=dict)  # the filter it was recorded with
    rotated: list[str] = field(default_factory=list)  # processes whose oldest files are gone

    @property
    def consistent(self) -> bool:
        """Nothing is wrong, and no process was killed."""
        return not self.findings and not self.deaths


class Notes:
    """Findings while they are collected: those of one kind become one."""

    def __init__(self) -> None:
        self.findings: dict[tuple[str, object], Finding] = {}
        self.processes: dict[int, str] = {}
        self.last: dict[int, Event] = {}  # of each process

    def add(
        self, kind: str, about: object, text: str, event: Event | None = None, excuses: Collection[int] | None = ()
    ) -> None:
        """`kind` and `about` say which findings are the same one. `excuses` as in Finding; (): nothing explains it."""
        place = "" if event is None else event.ref
        finding = self.findings.get((kind, about))
        if finding is not None:
            finding.count, finding.last = finding.count + 1, place
        else:
            found = frozenset(excuses) if excuses is not None else None
            self.findings[kind, about] = Finding(text, found, last=place)

    def name(self, pid: int) -> str:
        """`EngineCore_DP0 (pid 4346)`"""
        return f"{self.processes.get(pid, 'a process without a file')} (pid {pid})"


class Rule(Protocol):
    """One thing that holds in every recording."""

    def feed(self, event: Event, notes: Notes) -> None:
        """Process the next event, in causal order."""

    def end(self, notes: Notes) -> None:
        """The recording is over."""


class Deaths:
    """Which processes did not end as they should. Not a rule: what it finds explains what rules find."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}  # pid -> how it is known
        self._children: dict[int, list[int]] = {}
        self._serving: dict[int, bool] = {}  # API servers: have they said that they stopped?
        self._open_steps: dict[int, list[int]] = {}  # as many as are in flight
        self._gone: dict[int, Event] = {}  # pid of a front end -> its engine.dead
        self._newest: dict[str, int] = {}  # name of an engine or a worker -> pid: it may have been started again
        self._stopped: set[int] = set()  # engines and workers that ended as they were told to
        self._lanes = Lanes()

    def feed(self, event: Event) -> None:
        """Process the next event."""
        pid = event.pid
        self._lanes.feed(event)
        if event.name == "run.start":
            self._newest[event.proc] = pid
        elif event.name in ("engine.stopped", "worker.stopped"):
            self._stopped.add(pid)
        elif event.name == "dp.engine_lost":
            self._is_gone(self._newest.get(f"EngineCore_DP{event.args['engine']}"), event)
        elif event.name == "worker.dead":
            self._is_gone(self._newest.get(event.args["lane"]), event)
        elif event.name == "worker.failed":
            self._said[pid] = f"it failed: {event.args['message']}"
        elif event.name == "engine.spawned":
            self._children.setdefault(pid, []).append(event.args["pid"])
        elif event.name == "server.socket_bound":
            self._serving[pid] = False
        elif event.name == "server.stopped":
            self._serving[pid] = True
        elif event.name == "engine.failed":
            self._said[pid] = f"it failed: {event.args['message']}"
        elif event.name == "engine.dead":
            self._gone.setdefault(pid, event)
        elif event.name == "engine.step" and event.ph == "B":
            self._open_steps.setdefault(pid, []).append(event.step or 0)
        elif event.name == "engine.step":
            self._open_steps[pid] = [step for step in self._open_steps.get(pid, []) if step != event.step]

    def _is_gone(self, pid: int | None, noticed: Event) -> None:
        if pid is not None:
            self._said.setdefault(pid, f"{noticed.proc} noticed at {noticed.ref} that it was gone")

    def end(self, torn: Collection[int], notes: Notes) -> dict[int, tuple[str, str]]:
        """pid -> (what became of the process, how it is known). `torn`: those whose last line is torn."""
        every = [child for children in self._children.values() for child in children]
        for pid, event in self._gone.items():  # one of several API servers did not start the engine itself
            for child in self._children.get(pid, every):
                if child not in self._stopped:
                    self._is_gone(child, event)
        found = {pid: f"it ends in the middle of step {steps[0]}" for pid, steps in self._open_steps.items() if steps}
        found |= dict.fromkeys(torn, "its last line is torn")
        found |= {pid: "it never said that it stopped" for pid, stopped in self._serving.items() if not stopped}
        dead = {pid: ("was killed or still runs", how) for pid, how in (found | self._said).items()}
        for parent, children in self._children.items():
            for child in children if parent in dead else []:
                if self._open_steps.get(child):  # an engine ends at once when its front end is gone
                    dead[child] = (f"ended with its front end, {notes.name(parent)}", found[child])
        for engine in [pid for pid in dead if self._lanes.workers_of(pid)]:
            for worker in self._lanes.workers_of(engine):
                if worker not in dead and worker not in self._stopped:
                    dead[worker] = (f"ended with its engine, {notes.name(engine)}", "it never said that it stopped")
        return dead


def check(directory: str | Path) -> Report:
    """Read a recording and check everything that must hold. Raises FileNotFoundError and TraceError as the reader does."""
    from stagetrace.check.invariant_rules import Sequence, make_rules, well_formed

    recording, notes, deaths, sequence = Recording(directory), Notes(), Deaths(), Sequence()
    report = Report(processes=notes.processes, rotated=_rotated(Path(directory)))
    rules: list[Rule] | None = None
    for event in recording:
        report.events += 1
        notes.processes.setdefault(event.pid, event.proc)
        notes.last[event.pid] = event
        if event.name == "run.start":
            report.left_out.update(event.args.get("filter") or {})
        if rules is None:
            rules = make_rules(whole=not report.left_out and not report.rotated)
        sequence.feed(event, notes)
        if well_formed(event, notes):
            deaths.feed(event)
            for rule in rules:
                rule.feed(event, notes)
    for rule in rules or []:
        rule.end(notes)
    dead = deaths.end(_torn(Path(directory)), notes)
    for pid, (end, how) in dead.items():
        last = notes.last.get(pid)
        seen = "nothing of it was recorded" if last is None else f"its last recorded event is {last.ref} {last.name}"
        report.deaths.append(f"{notes.name(pid)} {end}: {how}; {seen}")
    report.findings = list(notes.findings.values())
    for finding in report.findings:
        reasons = dead if finding.excuses is None else [pid for pid in dead if pid in finding.excuses]
        finding.explained = ", ".join(f"{notes.name(pid)} {dead[pid][0]}" for pid in reasons)
    return report


def _rotated(directory: Path) -> list[str]:
    """The processes whose first file (part 0) is gone: `--trace-max-bytes` keeps the newest."""
    first: dict[str, int] = {}
    for path in directory.glob("*.jsonl"):
        name = path.name.partition(".")[0]
        with open(path, "rb") as file:
            try:
                part = decode_line(file.readline()).args.get("part", 0)
            except msgspec.DecodeError:  # reading it will say so
                continue
        first[name] = min(part, first.get(name, part))
    return [name for name, part in sorted(first.items()) if part]


def _torn(directory: Path) -> list[int]:
    """The processes whose file does not end with a whole line."""
    torn = []
    for path in sorted(directory.glob("*.jsonl")):
        pid = path.name.partition(".")[0].rpartition("-")[2]
        with open(path, "rb") as file:
            if file.seek(0, 2) and pid.isdigit():
                file.seek(-1, 2)
                if file.read() != b"\n":
                    torn.append(int(pid))
    return torn
