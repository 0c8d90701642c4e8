"""Walk through a recording, forward and back, and know at each event what the engine's state was.

Only a stretch of the recording is in memory: going back farther reads it again from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from stagetrace.event import Event
from stagetrace.read.lanes import Lanes
from stagetrace.read.reader import Recording

HISTORY = 4096  # events that are kept


@dataclass(frozen=True)
class EngineState:
    """What the events so far say about the engine."""

    step: int = 0
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    num_blocks: int | None = None
    free_blocks: int | None = None  # after the last decision
    budget: int | None = None  # tokens that a step may compute
    budget_left: int | None = None  # in the step in progress
    num_tokens: int = 0  # that were given to requests

    def after(self, event: Event) -> EngineState:
        """The state once this event has happened."""
        change = _CHANGES.get(event.name)
        return self if change is None else change(self, event)


def _created(state: EngineState, event: Event) -> EngineState:
    blocks, budget = event.args.get("num_blocks"), event.args.get("max_num_batched_tokens")
    return replace(state, num_blocks=blocks, free_blocks=blocks, budget=budget, budget_left=budget)


def _queued(state: EngineState, event: Event) -> EngineState:
    return replace(state, waiting=(*state.waiting, event.req or ""))


def _admitted(state: EngineState, event: Event) -> EngineState:
    return replace(state, waiting=_without(state.waiting, event.req), running=(*state.running, event.req or ""))


def _preempted(state: EngineState, event: Event) -> EngineState:
    free = event.args["free_before"] + event.args["freed_blocks"]
    waiting = (event.req or "", *state.waiting)
    return replace(state, waiting=waiting, running=_without(state.running, event.req), free_blocks=free)


def _finished(state: EngineState, event: Event) -> EngineState:
    waiting, running = _without(state.waiting, event.req), _without(state.running, event.req)
    return replace(state, waiting=waiting, running=running)


def _step(state: EngineState, event: Event) -> EngineState:
    return replace(state, step=event.step or 0, budget_left=state.budget) if event.ph == "B" else state


def _scheduled(state: EngineState, event: Event) -> EngineState:
    return replace(state, budget_left=event.args["budget_left"] - event.args["num_tokens"])


def _decided(state: EngineState, event: Event) -> EngineState:
    budget = event.args["budget"]
    return replace(
        state, free_blocks=event.args["free_blocks"], budget=budget, budget_left=budget - event.args["total_tokens"]
    )


def _token(state: EngineState, event: Event) -> EngineState:
    return replace(state, num_tokens=state.num_tokens + event.args["num_tokens"])


def _without(requests: tuple[str, ...], request: str | None) -> tuple[str, ...]:
    return tuple(other for other in requests if other != request)


_CHANGES: dict[str, Callable[[EngineState, Event], EngineState]] = {
    "scheduler.created": _created,
    "sched.queued": _queued,
    "sched.admit": _admitted,
    "sched.resume": _admitted,
    "sched.preempt": _preempted,
    "sched.finished": _finished,
    "engine.step": _step,
    "sched.scheduled": _scheduled,
    "sched.output": _decided,
    "sched.token": _token,
}


@dataclass(frozen=True)
class Place:
    """One event of the walk."""

    number: int  # of the event in the recording, from 1
    event: Event
    state: EngineState  # of its engine, after it
    engine: int = 0  # pid of that one: the event's own, its worker's, or else the one that was heard last
    states: dict[int, EngineState] = field(default_factory=dict)  # of all engines, by pid


class Walk:
    """A cursor over a recording. It is on one event, `place`; None for a recording without events."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._history: deque[Place] = deque(maxlen=HISTORY)
        self._restart()
        self.place = self._next_after(0)

    def forward(self, wanted: Callable[[Place], bool]) -> bool:
        """Go to the next event that is wanted; if there is none, stay and return False."""
        return self._go_to_first(self.place.number if self.place else 0, wanted)

    def from_start(self, wanted: Callable[[Place], bool]) -> bool:
        """Go to the first event of the recording that is wanted; if there is none, stay and return False."""
        return self._go_to_first(0, wanted)

    def back(self, wanted: Callable[[Place], bool]) -> bool:
        """Go to the last event before this one that is wanted; if there is none, stay and return False."""
        if self.place is None:
            return False
        end = self.place.number
        for place in reversed(self._history):
            if place.number < end and wanted(place):
                self.place = place
                return True
        first_kept = self._history[0].number
        found: int | None = None
        number = 0
        while (place_before := self._next_after(number)) is not None and place_before.number < first_kept:
            number = place_before.number
            if wanted(place_before):
                found = number
        return self._return_to(found if found is not None else end, found is not None)

    def _go_to_first(self, number: int, wanted: Callable[[Place], bool]) -> bool:
        start = self.place.number if self.place else 0
        while (place := self._next_after(number)) is not None:
            if wanted(place):
                self.place = place
                return True
            number = place.number
        return self._return_to(start, False)

    def _return_to(self, number: int, result: bool) -> bool:
        self.place = self._next_after(number - 1)
        return result

    def _next_after(self, number: int) -> Place | None:
        """The event after that number, from memory, from the recording, or from the recording's start."""
        if self._history and number + 1 < self._history[0].number:
            self._restart()
        if self._history and number < self._history[-1].number:
            return self._history[number + 1 - self._history[0].number]
        for event in self._events:
            place = self._after(self._history[-1] if self._history else Place(0, event, EngineState()), event)
            self._history.append(place)
            if place.number > number:
                return place
        return None

    def _after(self, last: Place, event: Event) -> Place:
        """The place of the next event. Several engines have a state each, and steps of the same numbers."""
        self._lanes.feed(event)
        engine, states = self._lanes.engine_of(event.pid), last.states
        if event.name not in _CHANGES:
            engine = engine if engine in states else last.engine
            return Place(last.number + 1, event, states.get(engine, EngineState()), engine, states)
        state = states.get(engine, EngineState()).after(event)
        return Place(last.number + 1, event, state, engine, states | {engine: state})

    def _restart(self) -> None:
        self._history.clear()
        self._lanes = Lanes()
        self._events: Iterator[Event] = iter(self._recording)
