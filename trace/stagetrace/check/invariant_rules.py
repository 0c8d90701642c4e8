"""What holds in every recording: one class per rule, for `invariants.check`. Each keeps only what is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagetrace.check.block_rules import BlockBalance
from stagetrace.check.invariants import Notes, Rule
from stagetrace.check.worker_rules import Collectives, StepsOfWorkers
from stagetrace.event import Event
from stagetrace.read.lanes import engine_number
from stagetrace.vocabulary import VOCABULARY


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _list_of(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(item, value))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": _is(int),
    "float": _is(int, float),
    "str": _is(str),
    "bool": _is(bool),
    "str | None": _is(str, type(None)),
    "list[int]": _list_of(_is(int)),
    "list[str]": _list_of(_is(str)),
    "dict[str, Any]": _is(dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
}


def well_formed(event: Event, notes: Notes) -> bool:
    """Is the event in the vocabulary, with its phase and its arguments? (`run.start` may say more than its row.)

    The rules below look at well-formed events only: others would break them, and are already reported.
    """
    row = VOCABULARY.get(event.name)
    if row is None:
        notes.add("name", event.name, f"{event.ref}: the vocabulary has no event {event.name}", event)
        return False
    more = event.args.keys() - row.args if event.name != "run.start" else set()
    wrong = [f"lacks {name}" for name in row.args if name not in event.args] + [f"has {name}" for name in more]
    for name, kind in row.args.items():
        if name in event.args and kind in _TYPES and not _TYPES[kind](event.args[name]):
            wrong.append(f"says {name}={event.args[name]!r}, which is no {kind}")
    if row.phase != event.phase:
        wrong.append(f"is of phase {row.phase}, not {event.phase}")
    if wrong:
        notes.add("arguments", (event.name, *wrong), f"{event.ref}: {event.name} {', '.join(sorted(wrong))}", event)
    return not wrong


class Sequence:
    """The events of a process are numbered without gaps: a missing number is a lost event."""

    def __init__(self) -> None:
        self._last: dict[int, int | None] = {}  # None: the first number is not known

    def feed(self, event: Event, notes: Notes) -> None:
        if event.name == "run.start":  # not counted: it is at the head of each file
            self._last.setdefault(event.pid, 0 if not event.args.get("part") else None)
            return
        last = self._last.get(event.pid, 0)
        if last is None:  # the files before this one were rotated away
            last = event.seq - 1
        if event.seq <= last:
            notes.add("twice", event.pid, f"{notes.name(event.pid)}: the number {event.seq} comes twice", event)
        elif event.seq > last + 1:
            lost = str(last + 1) if event.seq == last + 2 else f"{last + 1} to {event.seq - 1}"
            text = f"{notes.name(event.pid)}: event {lost} missing, before {event.ref} {event.name}"
            notes.add("gap", (event.pid, lost), text, event)
        self._last[event.pid] = max(last, event.seq)

    def end(self, notes: Notes) -> None:
        """Where the numbers should end is unknown."""


class Causality:
    """An event comes after the cause it names, and a message is received once, by the request or process it was sent to."""

    _SENT_FOR = {"zmq.request_received": "zmq.request_sent", "zmq.outputs_received": "zmq.outputs_sent"}

    def __init__(self) -> None:
        self._placed: dict[int, int] = {}  # pid -> number of its newest event
        self._under_way: dict[str, Event] = {}  # messages that were sent and not received yet

    def feed(self, event: Event, notes: Notes) -> None:
        if event.cause is not None:
            self._caused(event, event.cause, notes)
        if event.name in self._SENT_FOR.values():
            self._under_way[event.ref] = event
        self._placed[event.pid] = max(event.seq, self._placed.get(event.pid, 0))

    def _caused(self, event: Event, cause: str, notes: Notes) -> None:
        pid, _, seq = cause.partition(":")
        if not (pid.isdigit() and seq.isdigit()):
            notes.add(
                "cause", cause, f"{event.ref}: {event.name} names {cause!r} as its cause: there is no such event", event
            )
        elif int(seq) > self._placed.get(int(pid), -1):
            text = f"{event.ref}: {event.name} was caused by {cause}, which {notes.name(int(pid))} did not record before it"
            notes.add("lost cause", (event.name, pid), text, event, excuses=[int(pid)])
        elif event.name in self._SENT_FOR:
            sent = self._under_way.pop(cause, None)
            if sent is None or sent.name != self._SENT_FOR[event.name] or sent.req != event.req:
                text = f"{event.ref}: {event.name} names {cause} as its cause, which did not send it, or was received already"
                notes.add("wrong cause", (event.name, pid), text, event)

    def end(self, notes: Notes) -> None:
        for sent in self._under_way.values():
            if sent.args.get("type") == "ADD":
                text = f"{sent.ref}: request {sent.req} was sent to the engine and not received"
                notes.add("not received", sent.req, text, excuses=None)


class Requests:
    """Every request that is queued in an engine ends there once; every one that a front end expects ends for its client."""

    def __init__(self) -> None:
        self._queued: dict[tuple[int, str], Event] = {}
        self._expected: dict[tuple[int, str], int] = {}  # answers that are still to come
        self._children: dict[tuple[int, str], int] = {}
        self._refused: set[tuple[int, str]] = set()  # answers; their requests are named after them

    def feed(self, event: Event, notes: Notes) -> None:
        if event.req is None:
            return
        key = (event.pid, event.req)
        if event.name == "sched.queued":
            if key in self._queued:
                notes.add("queued twice", key, f"{event.ref}: {event.req} is queued again before it has ended", event)
            self._queued[key] = event
        elif event.name.startswith("sched."):
            if key not in self._queued:
                text = f"{event.ref}: {event.name} of {event.req}, which is not queued, or has ended"
                notes.add("not queued", key, text, event)
            if event.name == "sched.finished":
                self._queued.pop(key, None)
        elif event.name == "request.fanned_out":
            self._children[key] = event.args["children"]
        elif event.name == "request.registered":
            self._expected[key] = self._children.pop(key, 1)
        elif event.name in ("request.finished", "request.aborted"):
            self._ended(event, key, notes)
        elif event.name == "request.refused":
            self._refused |= {key, (event.pid, _answer(event.req))}

    def _ended(self, event: Event, key: tuple[int, str], notes: Notes) -> None:
        """The end of a request for its client, or of one of its answers (`0_r1` is the first answer of r1)."""
        if key not in self._expected:
            key = (key[0], key[1].partition("_")[2])
        if key not in self._expected:
            notes.add(
                "ends twice", key, f"{event.ref}: {event.name} of {event.req}, which is no longer expected", event
            )
            return
        self._expected[key] -= 1
        if event.name == "request.aborted" or not self._expected[key]:
            del self._expected[key]

    def end(self, notes: Notes) -> None:
        for (pid, req), event in self._queued.items():
            text = f"{req} was queued in {notes.name(pid)} at {event.ref} and never ended there"
            notes.add("never ended", (pid, req), text, excuses=None)
        for (pid, req), answers in self._expected.items():
            if (pid, req) in self._refused or (pid, _answer(req)) in self._refused:
                continue
            some = "" if answers == 1 else f" ({answers} of its answers)"
            text = f"{req} never ended for its client in {notes.name(pid)}{some}"
            notes.add("never answered", (pid, req), text, excuses=None)


def _answer(req: str) -> str:
    """The answer that a request is for: `cmpl-1-0` and `cmpl-1-1` are the two prompts of `cmpl-1`."""
    return req.rpartition("-")[0]


class Routing:
    """With several engines a front end routes a request before an engine hears of it, and it lives in one engine at a time."""

    def __init__(self) -> None:
        self._routed: dict[str, int] = {}  # request -> number of the engine that it was sent to last
        self._balanced = False
        self._lives_in: dict[str, Event] = {}  # request -> its sched.queued in the engine that has it

    def feed(self, event: Event, notes: Notes) -> None:
        req = event.req or ""
        if event.name == "client.created":
            self._balanced |= event.args["kind"] == "DPLBAsyncMPClient"
        elif event.name == "dp.routed":
            self._routed[req] = event.args["engine"]
        elif event.name == "sched.queued" and engine_number(event.proc) is not None:
            # under torchrun all processes have all
            self._queued(event, req, notes)
        elif event.name == "dp.engine_lost":
            lost = event.args["engine"]
            self._lives_in = {r: e for r, e in self._lives_in.items() if engine_number(e.proc) != lost}
        elif event.name == "sched.finished" and req in self._lives_in and self._lives_in[req].pid == event.pid:
            del self._lives_in[req]

    def _queued(self, event: Event, req: str, notes: Notes) -> None:
        number, before = engine_number(event.proc), self._lives_in.get(req)
        if self._balanced and number is not None and self._routed.get(req) != number:
            where = (
                f"was routed to engine {self._routed[req]}" if req in self._routed else "was not routed to any engine"
            )
            notes.add("not routed", req, f"{event.ref}: {req} is queued in {event.proc}, but {where}", event)
        if before is not None and before.pid != event.pid:
            text = f"{event.ref}: {req} is queued in {notes.name(event.pid)} while {notes.name(before.pid)} has it, since {before.ref}"
            notes.add("two engines", req, text, event, excuses=[before.pid])
        self._lives_in[req] = event

    def end(self, notes: Notes) -> None:
        """Who still has a request then is reported by another rule."""


class Spans:
    """The spans of a step end in the opposite order of their beginnings, and so do those of no step. With asynchronous scheduling
    the spans of two steps overlap."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int | None], list[Event]] = {}

    def feed(self, event: Event, notes: Notes) -> None:
        spans = self._open.setdefault((event.pid, event.step), []) if event.ph != "i" else []
        if event.ph == "B":
            spans.append(event)
        elif event.ph == "E":
            if spans and (spans[-1].name, spans[-1].req) == (event.name, event.req):
                spans.pop()
                if not spans:
                    del self._open[event.pid, event.step]
                return
            inner = f", within {spans[-1].name} which began at {spans[-1].ref}" if spans else ", and none is open"
            notes.add("span", event.pid, f"{event.ref}: a span {event.name} ends{inner}", event)

    def end(self, notes: Notes) -> None:
        for (pid, _), spans in self._open.items():
            for span in spans:
                text = f"{span.ref}: the span {span.name} began (step {span.step}) and never ended"
                notes.add("open span", span.ref, text, excuses=[pid])


class Steps:
    """Steps count up by one, and none gives more tokens than its budget, or to more requests than may run."""

    def __init__(self) -> None:
        self._seats: dict[int, int] = {}
        self._step: dict[int, int] = {}
        self._given: dict[int, dict[str, int]] = {}  # of the step that is open

    def feed(self, event: Event, notes: Notes) -> None:
        pid = event.pid
        if event.name == "scheduler.created":
            self._seats[pid], self._step[pid] = event.args["max_num_seqs"], 0
        elif event.name == "engine.step" and event.ph == "B":
            before, self._step[pid] = self._step.get(pid), event.step or 0
            if before is not None and event.step != before + 1:
                text = f"{event.ref}: step {event.step} comes after step {before}"
                notes.add("step", pid, text, event)
            self._given[pid] = {}
        elif event.name in ("sched.scheduled", "spec.scheduled"):
            given, req = self._given.setdefault(pid, {}), event.req or ""
            given[req] = given.get(req, 0) + event.args["num_tokens"]
        elif event.name == "sched.output":
            self._decided(event, self._given.get(pid, {}), notes)

    def _decided(self, event: Event, given: dict[str, int], notes: Notes) -> None:
        total, budget, seats = event.args["total_tokens"], event.args["budget"], self._seats.get(event.pid, len(given))
        wrong = []
        if sum(given.values()) != total:
            wrong.append(f"its requests get {sum(given.values())} tokens, and it says {total}")
        if sum(given.values()) > budget:
            wrong.append(f"{sum(given.values())} tokens are more than the budget of {budget}")
        if len(given) > seats:
            wrong.append(f"{len(given)} requests are more than the {seats} that may run")
        for text in wrong:
            notes.add("budget", (event.pid, event.step), f"{event.ref}: step {event.step}: {text}", event)

    def end(self, notes: Notes) -> None:
        """Nothing stays open."""


def make_rules(whole: bool) -> list[Rule]:
    """All rules except those of single events and their numbers; none for a recording that left events out on purpose."""
    if not whole:
        return []
    return [Causality(), Requests(), Routing(), Spans(), Steps(), StepsOfWorkers(), Collectives(), BlockBalance()]
