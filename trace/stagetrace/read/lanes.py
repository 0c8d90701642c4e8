"""Who is who among the processes of a recording: the engines, and the workers of each.

A step belongs to one engine: what identifies it is (pid of the engine, number of the step). An engine that was started again has
a new pid, and counts from 1 again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stagetrace.errors import TraceError
from stagetrace.event import Event

_ENGINE = re.compile(r"EngineCore_DP(\d+)")
_WORKER = re.compile(r"Worker(?:_DP\d+)?(?:_PP(\d+))?_TP(\d+)")


def engine_number(name: str) -> int | None:
    """1 for `EngineCore_DP1`; None for a process that is no engine core of a server."""
    match = _ENGINE.fullmatch(name)
    return None if match is None else int(match[1])


def place_of_worker(name: str) -> tuple[int, int] | None:
    """(pipeline stage, slice) of `Worker_PP1_TP0`; None for a process that is no worker."""
    match = _WORKER.fullmatch(name)
    return None if match is None else (int(match[1] or 0), int(match[2]))


def pid_of(ref: str | None) -> int | None:
    """The process of an event that another one names as its cause."""
    pid = (ref or "").partition(":")[0]
    return int(pid) if pid.isdecimal() else None


class Lanes:
    """Finds out whose worker a process is; `feed` takes events in causal order."""

    def __init__(self) -> None:
        self._engines: dict[int, int] = {}  # pid of a worker -> pid of its engine

    def feed(self, event: Event) -> None:
        """Process the next event."""
        if event.name == "worker.spawned":
            self._engines[event.args["pid"]] = event.pid
        elif event.name in ("worker.ready", "worker.step_received"):
            engine = pid_of(event.cause)
            if engine is not None:
                self._engines[event.pid] = engine

    def engine_of(self, pid: int) -> int:
        """The engine that a process works for: itself, unless it is a worker."""
        return self._engines.get(pid, pid)

    def workers_of(self, engine: int) -> list[int]:
        """Pids of the workers of an engine."""
        return [worker for worker, of in self._engines.items() if of == engine]


def choose_engine(engines: Iterable[tuple[int, str]], number: int) -> list[int]:
    """The pids of the engine of this number, several if it was started again. `engines` are (pid, name); one whose name has no number has
    its place. Raises TraceError."""
    named = [(pid, place if (own := engine_number(name)) is None else own) for place, (pid, name) in enumerate(engines)]
    found = [pid for pid, own in named if own == number]
    if not found:
        known = ", ".join(map(str, sorted({own for _, own in named}))) or "none"
        raise TraceError(f"--engine {number}: the recording has no such engine (it has {known})")
    return found


@dataclass
class Exchanges:
    """What one worker did in collectives of one kind."""

    count: int = 0
    ns: int = 0
    bytes: int = 0


@dataclass
class WorkerTime:
    """What one worker did with its time, in one step or in all."""

    lane: str
    engine: int  # pid
    forward_ns: int = 0  # in the model's forward pass, most exchanges included
    exchanges: dict[str, Exchanges] = field(default_factory=dict)  # kind of collective -> what it cost

    @property
    def waited_ns(self) -> int:
        """In collectives: sending, receiving, and waiting for the others."""
        return sum(one.ns for one in self.exchanges.values())


class WorkerTimes:
    """Sums what workers did in their steps; what they did before the first one, to measure the memory, does not count."""

    def __init__(self, step: tuple[int, int] | None = None) -> None:
        """`step`: only this one, (pid of the engine, number)."""
        self._times: dict[int, WorkerTime] = {}  # by pid
        self._only = step
        self._lanes = Lanes()
        self._step: dict[int, int] = {}  # of each worker
        self._begun: dict[tuple[int, str], int] = {}  # (pid, span) -> when

    @property
    def of_worker(self) -> dict[int, WorkerTime]:
        """By pid. A process that torchrun started is engine and worker in one: it is known by its collectives."""
        return {
            pid: time for pid, time in self._times.items() if time.exchanges or place_of_worker(time.lane) is not None
        }

    def feed(self, event: Event) -> None:
        """Process the next event."""
        self._lanes.feed(event)
        if event.step is not None:
            self._step[event.pid] = event.step
        step = self._step.get(event.pid, 0)
        if event.ph == "i" or not step or event.name not in ("model.forward", "worker.collective"):
            return
        engine = self._lanes.engine_of(event.pid)
        if self._only is not None and self._only != (engine, step):
            return
        if event.ph == "B":
            self._begun[event.pid, event.name] = event.ts
            return
        took = event.ts - self._begun.pop((event.pid, event.name), event.ts)
        time = self._times.setdefault(event.pid, WorkerTime(event.proc, engine))
        if event.name == "model.forward":
            time.forward_ns += took
        elif event.name == "worker.collective":
            kind = time.exchanges.setdefault(event.args["kind"], Exchanges())
            kind.count, kind.ns, kind.bytes = kind.count + 1, kind.ns + took, kind.bytes + event.args["bytes"]
