"""The first difference between two recordings: by engine step, and for each request by its own events.

Times, process ids and the random parts of request ids are ignored. A request of A is matched with the one of B that has the
same id without those parts, the n-th with the n-th. Both recordings are read side by side; memory holds only what one of them has
and the other has not reached yet.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from stagetrace.event import Event
from stagetrace.read.engine_state import EngineState
from stagetrace.read.lanes import engine_number
from stagetrace.read.reader import Recording

CORE = ("sched", "kv", "spec", "grammar")  # first words of what the engine decides
_FRONT = ("http", "request", "dp")
_RANDOM = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{8,32}(?![0-9a-zA-Z])")
_VOLATILE = {"seconds", "cached", "bytes", "trace_id", "parent_id", "running"}
_OF_COMPANY = {
    "budget_left",
    "waiting",
    "blocks",
    "new_blocks",
    "freed_blocks",
    "free_before",
    "free_blocks",
    "block",
    "needed_by",
}


@dataclass
class Fact:
    """What is compared of one event."""

    name: str
    req: str | None  # the request's id without its random parts
    args: dict[str, Any]

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.args.items()]
        return " ".join([self.name, *([self.req] if self.req else []), *words])


@dataclass
class StepFacts:
    """What an engine did in a step, including arrivals and departures since the step before."""

    step: int
    before: EngineState
    facts: list[Fact]


@dataclass
class Lane:
    """A sequence that A and B both have: the steps of an engine, or the events of a request in one process. `place` counts the
    items that are the same; `a` and `b` are the first that differ, None where a recording has none left."""

    a: StepFacts | Fact | None = None
    b: StepFacts | Fact | None = None
    place: int = 0
    differs: int = 0  # 0: nowhere; else its rank among the lanes that differ, the first to differ being 1


@dataclass
class Result:
    """What `compare` found."""

    settings: list[str] = field(default_factory=list)  # settings of the schedulers that differ
    engines: tuple[list[str], list[str]] = ([], [])  # names of those that each side has, in the order of their numbers
    steps: dict[int, Lane] = field(default_factory=dict)  # number of the engine -> its steps, where they differ
    requests: dict[str, Lane] = field(default_factory=dict)  # request -> its events, where they differ
    num_steps: list[int] = field(default_factory=lambda: [0, 0])
    num_requests: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def same(self) -> bool:
        """Nothing that is compared differs. Settings alone do not count."""
        return not self.steps and not self.requests and len(self.engines[0]) == len(self.engines[1])


class _Side:
    """Turns one recording into facts."""

    def __init__(self, only_core: bool) -> None:
        self.names: dict[str, str] = {}  # request id -> the same without random parts, and numbered
        self.engines: dict[int, int] = {}  # pid -> number; an engine that was started again has another pid
        self.engine_names: dict[int, str] = {}
        self.states: dict[int, EngineState] = {}
        self.settings: dict[int, dict[str, Any]] = {}  # number -> arguments of scheduler.created
        self._facts: dict[int, list[Fact]] = defaultdict(list)  # since the last step, for the next one
        self._open: dict[int, dict[int, StepFacts]] = defaultdict(dict)  # pid -> its steps in progress
        self._seen: dict[str, int] = defaultdict(int)
        self._only_core = only_core

    def name(self, request_id: str) -> str:
        """The id that the request may also have in the other recording."""
        if request_id not in self.names:
            plain = _RANDOM.sub("*", request_id)
            self._seen[plain] += 1
            self.names[request_id] = plain if self._seen[plain] == 1 else f"{plain}#{self._seen[plain]}"
        return self.names[request_id]

    def items(self, event: Event) -> Iterator[tuple[tuple[str, str], StepFacts | Fact]]:
        """(lane, item) for what this event completes."""
        first = event.name.partition(".")[0]
        if event.name == "scheduler.created":
            number = engine_number(event.proc)
            number = self.engines.setdefault(event.pid, len(self.engines) if number is None else number)
            self.engine_names[number], self.settings[number] = event.proc, event.args
        if event.pid in self.engines:
            yield from self._step(event, first)
        if event.req is None or first == "kv" or first not in (CORE if self._only_core else CORE + _FRONT):
            return  # which blocks a request has depends on the others; the steps are compared with them
        fact = self._fact(event)
        own = {key: len(v) if isinstance(v, list) else v for key, v in fact.args.items() if key not in _OF_COMPANY}
        side = "engine" if first in CORE else "front end"
        yield ("request " + side, self.name(event.req)), Fact(fact.name, None, own)

    def _step(self, event: Event, first: str) -> Iterator[tuple[tuple[str, str], StepFacts | Fact]]:
        state = self.states.setdefault(event.pid, EngineState())
        number, in_progress = event.step or 0, self._open[event.pid]
        if event.name == "engine.step" and event.ph == "B":
            in_progress[number] = StepFacts(number, self._renamed(state), self._facts.pop(event.pid, []))
        state.feed(event)
        if first in CORE:  # what names no step belongs to the newest decision
            step = in_progress.get(number) or in_progress.get(max(in_progress, default=0))
            (self._facts[event.pid] if step is None else step.facts).append(self._fact(event))
        if event.name == "engine.step" and event.ph == "E" and number in in_progress:
            yield ("step", str(self.engines[event.pid])), in_progress.pop(number)

    def _renamed(self, state: EngineState) -> EngineState:
        copy = state.copy()
        copy.requests = {self.name(i): request for i, request in copy.requests.items()}
        return copy

    def _fact(self, event: Event) -> Fact:
        args: dict[str, Any] = {key: value for key, value in event.args.items() if key not in _VOLATILE}
        if "block_hashes" in args:  # they begin with a random seed, unless --prefix-caching-hash-seed gives one
            args["block_hashes"] = len(args["block_hashes"])
        for key in ("first", "needed_by"):
            if args.get(key):
                args[key] = self.name(args[key])
        req = None if event.req is None else self.name(event.req)
        return Fact(event.name, req, {key: self._without_ids(value) for key, value in args.items()})

    def _without_ids(self, value: Any) -> Any:
        """With names in the place of the ids of requests that an event was about before, wherever they stand."""
        if isinstance(value, str):
            return self.names.get(value, value)
        if isinstance(value, list):
            return [self._without_ids(each) for each in value]
        if isinstance(value, dict):
            return {self._without_ids(key): self._without_ids(each) for key, each in value.items()}
        return value


class _Comparison:
    """Pairs the items of both sides, lane by lane."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[str, str], Lane] = {}
        self._waiting: tuple[dict, dict] = defaultdict(deque), defaultdict(deque)
        self._over = [False, False]
        self._different = 0

    def put(self, side: int, key: tuple[str, str], item: StepFacts | Fact) -> None:
        """The next item of a lane on one side (0 = A, 1 = B)."""
        lane = self.lanes.setdefault(key, Lane())
        if lane.differs:
            return
        theirs = self._waiting[1 - side][key]
        if theirs:
            other = theirs.popleft()
            self._pair(lane, *((other, item) if side else (item, other)))
        elif self._over[1 - side]:
            self._pair(lane, *((None, item) if side else (item, None)))
        else:
            self._waiting[side][key].append(item)
        if lane.differs:
            for queues in self._waiting:
                queues.pop(key, None)

    def end(self, side: int) -> None:
        """One recording is over: what the other has beyond it is a difference."""
        self._over[side] = True
        for key, queue in self._waiting[1 - side].items():
            lane = self.lanes[key]
            if queue and not lane.differs:
                self._pair(lane, *((queue[0], None) if side else (None, queue[0])))
        self._waiting[1 - side].clear()

    def _pair(self, lane: Lane, a: StepFacts | Fact | None, b: StepFacts | Fact | None) -> None:
        if a is not None and b is not None and _compared(a) == _compared(b):
            lane.place += 1
        else:
            self._different += 1
            lane.a, lane.b, lane.differs = a, b, self._different


def _compared(item: StepFacts | Fact) -> object:
    return item.facts if isinstance(item, StepFacts) else item


def compare(a: str | Path, b: str | Path, only_core: bool = False) -> Result:
    """Read two recordings side by side; `only_core`: compare what the engine decided, not what the front end said.

    Raises FileNotFoundError and TraceError as the reader does.
    """
    sides, comparison, result = (_Side(only_core), _Side(only_core)), _Comparison(), Result()
    for pair in zip_longest(Recording(a), Recording(b)):
        for number, event in enumerate(pair):
            if event is None:
                if not comparison._over[number]:
                    comparison.end(number)
                continue
            for key, item in sides[number].items(event):
                result.num_steps[number] += key[0] == "step"
                comparison.put(number, key, item)
    for number in (0, 1):
        if not comparison._over[number]:
            comparison.end(number)
        result.num_requests[number] = len(sides[number].names)
    for (kind, name), lane in sorted(comparison.lanes.items(), key=lambda item: item[1].differs):
        if lane.differs and kind == "step":
            result.steps[int(name)] = lane
        elif lane.differs:
            result.requests.setdefault(name, lane)
    result.engines = tuple([name for _, name in sorted(side.engine_names.items())] for side in sides)  # type: ignore[assignment]
    for number in sides[0].settings.keys() & sides[1].settings.keys():
        differ = _settings(sides[0].settings[number], sides[1].settings[number])
        result.settings += [line for line in differ if line not in result.settings]
    return result


def _settings(a: dict[str, Any], b: dict[str, Any], inside: str = "") -> Iterator[str]:
    for key in [*a, *(key for key in b if key not in a)]:
        if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
            yield from _settings(a[key], b[key], f"{inside}{key}.")
        elif a.get(key) != b.get(key) and not (inside and key in ("max_num_seqs", "max_num_batched_tokens")):
            yield f"{inside}{key}: A {a.get(key)}, B {b.get(key)}"
