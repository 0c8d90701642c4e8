"""What a recording holds: its requests, its engine steps, its messages. Whatever counts or draws builds on this.

`tell(events)` makes a `Story` of a whole recording; `Story.feed` takes one event after another. Times are nanoseconds of
`time.monotonic_ns()`; step numbers are a scheduler's and begin at 1: with several engines, a step is known by (pid of its engine, number).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from stagetrace.event import Event
from stagetrace.read.deliveries import Deliveries, Delivery
from stagetrace.read.lanes import Lanes, choose_engine


@dataclass
class Span:
    """A stretch of a request's life in the engine.

    wait       queued, not admitted yet
    prefill    computing tokens that it already has: its prompt or, after a preemption, what was lost
    decode     caught up: every step gives a token
    preempted  out of the batch, waiting to come back
    """

    kind: str
    start_ns: int
    end_ns: int
    first_step: int
    last_step: int
    num_tokens: int = 0  # computed in it
    engine: int = 0  # pid


@dataclass
class RequestStory:
    """One request of the engine. `first` and `last` hold the time of the first and last event of each name."""

    request_id: str
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt: found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    reason: str | None = (
        None  # of its end: stop, length, abort, error; the engine calls a stop string an abort, the front end not
    )
    engines: list[int] = field(default_factory=list)  # pids of those that had it: another one follows where one died
    token_ns: list[int] = field(default_factory=list)  # when the engine had each output token
    chunk_ns: list[int] = field(default_factory=list)  # when each server-sent event left
    delivery: Delivery = field(default_factory=Delivery)  # the path of each token to the client

    @property
    def in_engine_ns(self) -> int:
        """When the scheduler first had it, for a request with spans; the first span's start if that was not recorded."""
        return self.first.get("sched.queued", self.spans[0].start_ns)


@dataclass
class Scheduled:
    """What one request gets in one step: `num_tokens` of the `missing` ones, after `num_computed` others."""

    num_tokens: int
    num_computed: int
    missing: int
    budget_left: int
    new_blocks: list[int]
    num_drafts: int = 0  # on top of num_tokens, to be verified


@dataclass
class StepStory:
    """One step of the engine: the decision, and its results."""

    step: int
    start_ns: int
    engine: int = 0  # pid
    end_ns: int = 0  # 0: the recording ends within the step
    running: int = 0  # requests, when it began
    waiting: int = 0
    budget: int = 0
    total_tokens: int = 0
    free_blocks: int = 0  # after the decision
    decided_ns: int = 0  # when the scheduler was done
    num_changes: int = 0  # how many of Story.blocks are from before that
    forward_ns: tuple[int, int] = (0, 0)  # beginning and end of the model's forward pass
    sampled_ns: int = 0  # when the next tokens were drawn
    scheduled: dict[str, Scheduled] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: dict[str, dict[str, Any]] = field(default_factory=dict)  # request -> arguments of sched.preempt
    prefix_hits: dict[str, int] = field(default_factory=dict)  # request -> tokens found
    held_back: dict[str, Any] = field(default_factory=dict)  # arguments of sched.held_back; empty: none waits
    tokens: dict[str, int] = field(default_factory=dict)  # request -> tokens that it received
    finished: dict[str, str] = field(default_factory=dict)  # request -> reason


@dataclass
class Message:
    """One message over ZMQ, when both ends were recorded. `req` is set for requests, `step` for outputs."""

    name: str  # zmq.request_sent or zmq.outputs_sent
    sent_ns: int
    received_ns: int
    sender: int  # pid
    receiver: int
    req: str | None
    step: int | None


@dataclass
class BlockChange:
    """A KV-cache event: kv.allocated, kv.freed, kv.cached, kv.evicted, kv.reset (one that was carried out), or sched.prefix_hit."""

    name: str
    ts: int
    step: int  # 0 before the first one
    req: str | None
    blocks: list[int]
    engine: int = 0  # pid


class Story:
    """Everything that views need, taken from events in causal order.

    With `on_step` each complete step is handed over and not kept, and `blocks` and `messages` stay empty: so memory
    grows only with the requests. `stagetrace.read.bounded` hands over these too.
    """

    def __init__(self, on_step: Callable[[StepStory], None] | None = None) -> None:
        self.processes: dict[int, str] = {}  # pid -> name
        self.headers: dict[int, dict[str, Any]] = {}  # pid -> arguments of run.start
        self.settings: dict[str, Any] = {}  # arguments of scheduler.created, of the latest engine
        self.engines: dict[int, dict[str, Any]] = {}  # pid of an engine -> its own
        self.requests: dict[str, RequestStory] = {}
        self.steps: list[StepStory] = []
        self.messages: list[Message] = []
        self.blocks: list[BlockChange] = []
        self.start_ns = 0
        self.end_ns = 0
        self.deliveries = Deliveries()
        self._on_step = on_step
        self._open: dict[tuple[int, int], StepStory] = {}  # (pid, step); an engine with asynchronous scheduling has two
        self._sent: dict[str, Event] = {}
        self.lanes = Lanes()
        self._last_step: dict[int, int] = {}  # pid of an engine -> its newest step

    def feed(self, event: Event) -> None:
        """Process the next event."""
        self.processes.setdefault(event.pid, event.proc)
        self.start_ns = min(self.start_ns or event.ts, event.ts)
        self.end_ns = max(self.end_ns, event.ts)
        self.deliveries.feed(event)
        self.lanes.feed(event)
        if event.req is not None:
            request = self._request(event.req)
            name = sys.intern(event.name)
            request.first.setdefault(name, event.ts)
            request.last[name] = event.ts
        if event.name == "engine.step":
            self._step(event)
        elif (handle := _HANDLERS.get(event.name)) is not None:
            handle(self, event)

    def _request(self, request_id: str) -> RequestStory:
        if request_id not in self.requests:
            self.requests[request_id] = RequestStory(request_id, delivery=self.deliveries.delivery(request_id))
        return self.requests[request_id]

    def _step(self, event: Event) -> None:
        number = event.step or 0
        if event.ph == "B":
            step = StepStory(number, event.ts, event.pid, running=event.args["running"], waiting=event.args["waiting"])
            self._last_step[event.pid] = number
            self._open[event.pid, number] = step
            if self._on_step is None:
                self.steps.append(step)
        elif (event.pid, number) in self._open:
            step = self._open.pop((event.pid, number))
            step.end_ns = event.ts
            for request_id in step.tokens:
                for span in self._request(request_id).spans[-1:]:
                    span.end_ns = event.ts
            if self._on_step is not None:
                self._on_step(step)

    def _step_of(self, event: Event) -> StepStory | None:
        """The step in progress that an event of an engine or its worker belongs to; the newest one if it names none."""
        engine = self.lanes.engine_of(event.pid)
        return self._open.get((engine, self._newest(event) if event.step is None else event.step))

    def _newest(self, event: Event, default: int = 0) -> int:
        """The newest step in progress in the process of an event."""
        return max((step for pid, step in self._open if pid == event.pid), default=default)

    def _span(self, event: Event, kind: str) -> None:
        """Begin a span of the event's request; the one before it ends."""
        spans = self.requests[event.req or ""].spans
        step = event.step or self._newest(event)
        if spans:
            spans[-1].end_ns = event.ts
        spans.append(Span(kind, event.ts, event.ts, step, step, engine=event.pid))

    # One method per event that changes what is known

    def _header(self, event: Event) -> None:
        self.headers[event.pid] = event.args

    def _created(self, event: Event) -> None:
        self.settings = self.engines[event.pid] = event.args

    def _routed(self, event: Event) -> None:
        """The engine that had it died: what the front end had not received is computed again elsewhere."""
        request = self.requests[event.req or ""]
        if event.args["again"]:
            del request.token_ns[len(request.delivery.tokens) :]

    def _prefilled(self, event: Event) -> None:
        """It goes on elsewhere, without the token that ended it here."""
        request = self.requests[event.req or ""]
        del request.token_ns[len(request.delivery.tokens) :]
        request.num_output_tokens, request.reason = len(request.token_ns), None

    def _queued(self, event: Event) -> None:
        request = self.requests[event.req or ""]
        request.num_prompt_tokens = event.args["num_prompt_tokens"]
        request.engines.append(event.pid)
        self._span(event, "wait")

    def _admitted(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None:
            (step.admitted if event.name == "sched.admit" else step.resumed).append(event.req or "")
        self._span(event, "prefill")

    def _prefix_hit(self, event: Event) -> None:
        request = self.requests[event.req or ""]
        if not request.num_preemptions and len(request.engines) < 2:  # later it finds what was computed for it
            request.num_cached_tokens += event.args["num_tokens"]
        if (step := self._step_of(event)) is not None:
            step.prefix_hits[event.req or ""] = event.args["num_tokens"]
        self._blocks(event)

    def _scheduled(self, event: Event) -> None:
        scheduled = Scheduled(**event.args)
        if (step := self._step_of(event)) is not None:
            step.scheduled[event.req or ""] = scheduled
        request = self.requests[event.req or ""]
        spans = request.spans
        if spans and spans[-1].kind == "prefill" and self._is_decode(event.pid, request, scheduled):
            self._span(event, "decode")
        if spans:
            span = spans[-1]
            span.num_tokens += scheduled.num_tokens
            span.last_step, span.end_ns = event.step or 0, event.ts

    def _is_decode(self, engine: int, request: RequestStory, scheduled: Scheduled) -> bool:
        """Is what it lacks the token that it received last or, with asynchronous scheduling, that a step in flight gives it?"""
        if request.token_ns and request.token_ns[-1] > request.spans[-1].start_ns:
            return True
        ahead = self.engines.get(engine, {}).get("scheduler_config", {}).get("async_scheduling", False)
        return ahead and scheduled.num_computed >= request.num_prompt_tokens + request.num_output_tokens

    def _drafts(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None and event.req in step.scheduled:
            step.scheduled[event.req].num_drafts = event.args["num_tokens"]

    def _preempted(self, event: Event) -> None:
        self.requests[event.req or ""].num_preemptions += 1
        if (step := self._step_of(event)) is not None:
            step.preempted[event.req or ""] = event.args
        self._span(event, "preempted")

    def _held_back(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None:
            step.held_back = event.args

    def _decided(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None:
            step.budget, step.total_tokens = event.args["budget"], event.args["total_tokens"]
            step.free_blocks, step.decided_ns = event.args["free_blocks"], event.ts
            step.num_changes = len(self.blocks)

    def _forward(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None:
            begin, end = step.forward_ns  # of several workers: from the first one's beginning to the last one's end
            step.forward_ns = (min(begin or event.ts, event.ts), max(end, event.ts))

    def _sampled(self, event: Event) -> None:
        if (step := self._step_of(event)) is not None:
            step.sampled_ns = max(step.sampled_ns, event.ts)

    def _token(self, event: Event) -> None:
        request = self.requests[event.req or ""]
        request.num_output_tokens = event.args["num_output_tokens"]
        new = event.args["num_tokens"]
        if len(set(request.engines)) > 1:  # it runs again, and gets its first tokens once more
            new = max(0, min(new, request.num_output_tokens - len(request.token_ns)))
        request.token_ns += [event.ts] * new
        if (step := self._step_of(event)) is not None:
            step.tokens[event.req or ""] = event.args["num_tokens"]

    def _finished(self, event: Event) -> None:
        request = self.requests[event.req or ""]
        request.reason = request.reason or event.args["reason"]
        if request.spans:
            request.spans[-1].end_ns = event.ts
        if (step := self._step_of(event)) is not None:
            step.finished[event.req or ""] = event.args["reason"]

    def _answered(self, event: Event) -> None:
        self.requests[event.req or ""].reason = event.args["reason"]

    def _beam_start(self, event: Event) -> None:
        self.requests[event.req or ""].num_prompt_tokens = event.args["num_prompt_tokens"]

    def _beam_finished(self, event: Event) -> None:
        request = self.requests[event.req or ""]
        request.reason, request.num_output_tokens = event.args["reason"], event.args["num_output_tokens"]

    def _chunk(self, event: Event) -> None:
        self.requests[event.req or ""].chunk_ns.append(event.ts)

    def _blocks(self, event: Event) -> None:
        if self._on_step is None and event.args.get("done", True):  # a reset that was refused changes nothing
            blocks = event.args.get("blocks", [])
            blocks = [event.args["block"]] if event.name == "kv.evicted" else blocks
            step = self._newest(event, self._last_step.get(event.pid, 0))
            self.blocks.append(BlockChange(event.name, event.ts, step, event.req, blocks, event.pid))

    def _message_sent(self, event: Event) -> None:
        if self._on_step is None:
            self._sent[event.ref] = event

    def _message_received(self, event: Event) -> None:
        sent = self._sent.pop(event.cause or "", None)
        if sent is not None:
            self.messages.append(Message(sent.name, sent.ts, event.ts, sent.pid, event.pid, sent.req, sent.step))


_HANDLERS: dict[str, Callable[[Story, Event], None]] = {
    "run.start": Story._header,
    "scheduler.created": Story._created,
    "dp.routed": Story._routed,
    "dp.prefilled": Story._prefilled,
    "sched.queued": Story._queued,
    "sched.admit": Story._admitted,
    "sched.resume": Story._admitted,
    "sched.prefix_hit": Story._prefix_hit,
    "sched.scheduled": Story._scheduled,
    "spec.scheduled": Story._drafts,
    "sched.preempt": Story._preempted,
    "sched.held_back": Story._held_back,
    "sched.output": Story._decided,
    "model.forward": Story._forward,
    "sampler.sampled": Story._sampled,
    "sched.token": Story._token,
    "sched.finished": Story._finished,
    "request.finished": Story._answered,
    "beam.start": Story._beam_start,
    "beam.finished": Story._beam_finished,
    "sse.chunk": Story._chunk,
    "kv.allocated": Story._blocks,
    "kv.freed": Story._blocks,
    "kv.cached": Story._blocks,
    "kv.evicted": Story._blocks,
    "kv.reset": Story._blocks,
    "zmq.request_sent": Story._message_sent,
    "zmq.outputs_sent": Story._message_sent,
    "zmq.request_received": Story._message_received,
    "zmq.outputs_received": Story._message_received,
}


def tell(events: Iterable[Event]) -> Story:
    """The story of a whole recording, kept in memory."""
    story = Story()
    for event in events:
        story.feed(event)
    return story


def one_engine(story: Story, number: int | None = None) -> Story:
    """What a story says of one engine: its steps, blocks, settings, and the requests that it had. `number` is that of `EngineCore_DP1`; of an
    engine that was started again, the first of its processes. None: the first engine. Raises TraceError for one that is not there.
    """
    engines = sorted(((pid, story.processes[pid]) for pid in story.engines), key=lambda engine: engine[1])
    if len(engines) < 2 and number is None:
        return story
    return of_engine(story, engines[0][0] if number is None else choose_engine(engines, number)[0])


def of_engine(story: Story, pid: int) -> Story:
    """What a story says of the engine with this pid."""
    if len(story.engines) < 2:
        return story
    others = {other for other in story.engines if other != pid}
    own = copy(story)
    own.settings, own.engines = story.engines[pid], {pid: story.engines[pid]}
    own.processes = {p: name for p, name in story.processes.items() if story.lanes.engine_of(p) not in others}
    own.blocks = [change for change in story.blocks if change.engine == pid]
    before = [0]  # of the first n changes, how many are this engine's
    for change in story.blocks:
        before.append(before[-1] + (change.engine == pid))
    own.steps = [replace(step, num_changes=before[step.num_changes]) for step in story.steps if step.engine == pid]
    own.messages = [m for m in story.messages if m.sender not in others and m.receiver not in others]
    own.requests = {
        request_id: replace(request, spans=[span for span in request.spans if span.engine == pid])
        for request_id, request in story.requests.items()
        if pid in request.engines or not request.engines
    }
    return own
