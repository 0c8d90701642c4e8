"""The parts of a request that OTLP shows as spans, gathered from events in causal order and handed over when it is over."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from stagetrace.event import Event
from stagetrace.export.lingering import Lingering
from stagetrace.ids import root_of
from stagetrace.read.lanes import pid_of
from stagetrace.read.story import RequestStory, Story

MAX_PENDING = 4096  # messages on their way, and steps whose outputs are


@dataclass
class Part:
    """From `start_ns` to `end_ns`, in the process `pid`."""

    name: str
    start_ns: int
    end_ns: int
    pid: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineRequest:
    """One request of the engine: a prompt, or one of its several answers."""

    story: RequestStory
    front_pid: int = 0  # 0: not seen yet
    engine_pid: int = 0
    reason: str | None = None  # of its end for the client, else in the engine; None: it did not end
    parts: list[Part] = field(default_factory=list)  # ipc and detokenize
    marks: list[Event] = field(default_factory=list)  # preemptions and prefix hits


@dataclass
class HttpRequest:
    """One HTTP request and all that it caused; without HTTP, one request of `LLM`."""

    root: str
    first_ns: int
    last_ns: int = 0
    pid: int = 0  # of the API server, 0 without HTTP
    ids: set[str] = field(default_factory=set)
    said: dict[str, dict[str, Any]] = field(default_factory=dict)  # event name -> its latest arguments, of _SAID
    engine: dict[str, EngineRequest] = field(default_factory=dict)


_SAID = {
    "http.request",
    "http.response",
    "request.validated",
    "request.sampling_params",
    "request.refused",
    "request.aborted",
}
_MARKS = {"sched.preempt", "sched.prefix_hit", "dp.routed"}


class Gatherer:
    """Feed it events; each request that is over goes to `done`, the rest with `finish`."""

    def __init__(self, done: Callable[[HttpRequest], None]) -> None:
        self.story = Story(on_step=lambda step: None)
        self._done = done
        self._requests: dict[str, HttpRequest] = {}
        self._ended = Lingering()
        self._sent: OrderedDict[str, Event] = OrderedDict()  # ref -> a message on its way
        # (pid of the engine, step) -> who received tokens in it
        self._in_step: OrderedDict[tuple[int | None, int | None], list[str]] = OrderedDict()
        self._arrived: dict[str, deque[int]] = {}  # request -> when its outputs arrived that are not text yet

        self._latest_arrival = 0

    def feed(self, event: Event) -> None:
        """Process the next event."""
        self.story.feed(event)
        if event.name in ("zmq.request_sent", "zmq.outputs_sent"):
            _keep(self._sent, event.ref, event)
        elif event.name == "zmq.outputs_received":
            self._outputs_received(event)
        elif event.name == "sched.token" and event.step is not None:
            self._in_step.setdefault((event.pid, event.step), []).append(event.req or "")
            while len(self._in_step) > MAX_PENDING:
                self._in_step.popitem(last=False)
        if event.req is not None:
            self._of_request(event, event.req)

    def finish(self) -> None:
        """The recording is over, and so are all requests."""
        for root in list(self._requests):
            self._forget(root)

    def _of_request(self, event: Event, request_id: str) -> None:
        root = root_of(request_id)
        request = self._requests.setdefault(root, HttpRequest(root, event.ts))
        request.last_ns = event.ts
        request.ids.add(request_id)
        if event.name in _SAID:
            request.said[event.name] = event.args
        if event.name == "http.request":
            request.pid = event.pid
        engine = request.engine.get(request_id)
        if engine is None and (event.phase == 7 or event.name == "sched.queued"):
            engine = request.engine[request_id] = EngineRequest(self.story.requests[request_id])
        if engine is not None:
            self._of_engine_request(event, engine)
        if (over := self._ended.hear(root, event)) is not None:
            self._forget(over)

    def _of_engine_request(self, event: Event, request: EngineRequest) -> None:
        if event.name == "sched.queued":
            request.engine_pid = event.pid
        elif not request.engine_pid and not request.front_pid:
            request.front_pid = event.pid
        if event.name in ("sched.finished", "request.finished"):  # a stop string: finished, but aborted in the engine
            request.reason = event.args["reason"] if event.phase == 9 else request.reason or event.args["reason"]
        elif event.name in _MARKS:
            request.marks.append(event)
        elif event.name == "zmq.request_received" and event.cause in self._sent:
            sent = self._sent.pop(event.cause or "")
            request.parts.append(Part("ipc", sent.ts, event.ts, sent.pid, {"message": event.args["type"]}))
        elif event.name == "request.detokenized" and self._latest_arrival:
            arrived = self._arrived.get(event.req or "")
            start = arrived.popleft() if arrived else self._latest_arrival  # the engine's side may be lost
            args = {"num_tokens": event.args["num_tokens"], "characters": event.args["characters"]}
            request.parts.append(Part("detokenize", start, event.ts, event.pid, args))

    def _outputs_received(self, event: Event) -> None:
        self._latest_arrival = event.ts
        sent = self._sent.pop(event.cause or "", None)
        key = (pid_of(event.cause), event.step)
        left: list[str] = []  # of another API server: the engine sends it a message of its own
        for request_id in self._in_step.pop(key, []):
            request = self._requests.get(root_of(request_id))
            if request is not None and request.pid not in (0, event.pid):
                left.append(request_id)
            elif request is not None and request_id in request.engine:
                self._arrived.setdefault(request_id, deque()).append(event.ts)
                if sent is not None:
                    part = Part("ipc", sent.ts, event.ts, sent.pid, {"message": "outputs", "step": event.step})
                    request.engine[request_id].parts.append(part)
        if left:
            self._in_step[key] = left

    def _forget(self, root: str) -> None:
        request = self._requests.pop(root)
        self._done(request)
        for request_id in request.ids:
            self.story.requests.pop(request_id, None)
            self.story.deliveries.forget(request_id)
            self._arrived.pop(request_id, None)


def _keep(pending: OrderedDict[str, Event], key: str, event: Event) -> None:
    pending[key] = event
    if len(pending) > MAX_PENDING:
        pending.popitem(last=False)


def gather(events: Iterable[Event], done: Callable[[Story, HttpRequest], None]) -> None:
    """Call `done` for every request of a recording, in bounded memory."""
    gatherer = Gatherer(lambda request: done(gatherer.story, request))
    for event in events:
        gatherer.feed(event)
    gatherer.finish()
