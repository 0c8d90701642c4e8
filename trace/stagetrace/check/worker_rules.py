"""What holds between an engine and its workers, and among the workers: rules for `invariants.check`."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from stagetrace.check.invariants import Notes
from stagetrace.event import Event
from stagetrace.read.lanes import Lanes, place_of_worker


class StepsOfWorkers:
    """A step that an executor sends is received once by each worker and answered once, and what is received was sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Event] = {}  # executor.step_sent, by ref
        self._received: dict[str, set[int]] = {}  # the same ref -> workers
        self._unanswered: dict[tuple[int, int | None], Event] = {}  # (pid of the engine, step)
        self._outputs: dict[str, Event] = {}  # worker.output_sent that was not received yet
        self._lanes = Lanes()

    def feed(self, event: Event, notes: Notes) -> None:
        self._lanes.feed(event)
        match event.name:
            case "executor.step_sent":
                self._sent[event.ref] = self._unanswered[event.pid, event.step] = event
                self._received[event.ref] = set()
            case "worker.step_received":
                self._step_received(event, notes)
            case "worker.output_sent":
                self._outputs[event.ref] = event
            case "executor.output_received":
                self._answered(event, notes)

    def _step_received(self, event: Event, notes: Notes) -> None:
        sent = self._sent.get(event.cause or "")
        if sent is None or sent.step != event.step or event.pid in self._received[sent.ref]:
            text = f"{event.ref}: {event.proc} received step {event.step}, which {event.cause or 'no event'} did not send it, or it had it already"
            notes.add("step from nowhere", event.pid, text, event, excuses=self._family(event.pid))
            return
        self._received[sent.ref].add(event.pid)
        if len(self._received[sent.ref]) == sent.args["workers"]:
            del self._sent[sent.ref], self._received[sent.ref]

    def _answered(self, event: Event, notes: Notes) -> None:
        sent, output = self._unanswered.pop((event.pid, event.step), None), self._outputs.pop(event.cause or "", None)
        if sent is None or output is None or output.step != event.step:
            text = f"{event.ref}: {event.proc} has the output of step {event.step}, which {event.cause or 'no event'} did not send, or nobody asked for"
            notes.add("wrong output", event.pid, text, event, excuses=self._family(event.pid))

    def _family(self, pid: int) -> list[int]:
        engine = self._lanes.engine_of(pid)
        return [engine, *self._lanes.workers_of(engine)]

    def end(self, notes: Notes) -> None:
        for sent in self._sent.values():
            got = len(self._received[sent.ref])
            text = f"{sent.ref}: {got} of {sent.args['workers']} workers received step {sent.step}"
            notes.add("step not received", sent.pid, text, sent, excuses=self._family(sent.pid))
        for (pid, step), sent in self._unanswered.items():
            text = f"{sent.ref}: step {step} was sent to the workers and never answered"
            notes.add("step not answered", pid, text, sent, excuses=self._family(pid))


_Exchange = tuple[str, int]  # kind and bytes
_Slice = tuple[int, int, int]  # (pid of the engine, pipeline stage, slice)


class Collectives:
    """A collective has as many ends as workers: the slices of a stage make the same sums and gathers in the same order, and what a
    stage sends, the next one receives."""

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._pids: dict[_Slice, int] = {}
        self._together: dict[_Slice, deque[Event]] = {}  # that not all slices of the stage have made yet
        self._on_the_way: dict[_Slice, deque[Event]] = {}  # sent by this one, or expected by it from the stage before

    def feed(self, event: Event, notes: Notes) -> None:
        self._lanes.feed(event)
        place = place_of_worker(event.proc)
        if place is None:
            return
        key = (self._lanes.engine_of(event.pid), *place)
        if event.pid != self._pids.get(key):  # its first event
            self._pids[key] = event.pid
            self._together.setdefault(key, deque())
            self._on_the_way.setdefault(key, deque())
        if event.name != "worker.collective" or event.ph != "E":
            return
        if event.args["kind"] in ("send", "receive"):
            self._on_the_way[key].append(event)
            sender = key if event.args["kind"] == "send" else (key[0], key[1] - 1, key[2])
            self._match([sender, (sender[0], sender[1] + 1, sender[2])], notes)
        else:
            self._together[key].append(event)
            self._match_slices(key, notes)

    def _match_slices(self, key: _Slice, notes: Notes) -> None:
        stage = [self._together[other] for other in self._together if other[:2] == key[:2]]
        if all(stage):
            heads = [queue.popleft() for queue in stage]
            for one, other in pairwise(heads):
                if _of(one) != _of(other):
                    self._differ(one, other, notes)

    def _match(self, ends: list[_Slice], notes: Notes) -> None:
        """What one stage sent, and the next one received: the first of each belong together."""
        sent = next((e for e in self._on_the_way.get(ends[0], ()) if e.args["kind"] == "send"), None)
        received = next((e for e in self._on_the_way.get(ends[1], ()) if e.args["kind"] == "receive"), None)
        if sent is not None and received is not None:
            self._on_the_way[ends[0]].remove(sent)
            self._on_the_way[ends[1]].remove(received)
            if sent.args["bytes"] != received.args["bytes"]:
                self._differ(sent, received, notes)

    def _differ(self, one: Event, other: Event, notes: Notes) -> None:
        text = f"{one.ref}: {one.proc} made {_words(one)}, while {other.proc} made {_words(other)} ({other.ref})"
        notes.add("collective", self._lanes.engine_of(one.pid), text, other)

    def end(self, notes: Notes) -> None:
        for key, queue in [*self._together.items(), *self._on_the_way.items()]:
            if queue:
                pid = self._pids[key]
                engine = self._lanes.engine_of(pid)
                text = f"{queue[0].ref}: {notes.name(pid)} made {_words(queue[0])} that another worker did not make with it"
                family = [engine, *self._lanes.workers_of(engine)]
                notes.add("collective alone", key, text, queue[-1], excuses=family)


def _of(event: Event) -> _Exchange:
    return event.args["kind"], event.args["bytes"]


def _words(event: Event) -> str:
    return f"{event.args['kind']} of {event.args['bytes']} bytes"
