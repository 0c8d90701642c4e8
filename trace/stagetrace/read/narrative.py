"""The story of one request in lines: every event until its first chunk, then its steps and chunks, and what interrupts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stagetrace.event import Event
from stagetrace.ids import root_of
from stagetrace.read.columns import arguments
from stagetrace.read.lanes import pid_of

_LOOP = {"sched.scheduled", "sched.token", "zmq.outputs_sent", "zmq.outputs_received", "request.detokenized", "request.collected",
         "generate.yield", "sse.chunk", "kv.allocated", "kv.cached", "spec.proposed", "spec.scheduled", "spec.verified"}  # fmt: skip


@dataclass
class Line:
    """What happened at a time, or during one."""

    start_ns: int
    end_ns: int
    phase: int
    process: str
    text: str


@dataclass
class _Round:
    """Steps in a row that each gave the request its next tokens."""

    start_ns: int
    end_ns: int
    first_step: int = 0
    last_step: int = 0
    tokens: int = 0
    chunks: int = 0
    own: int = 0  # tokens of the request that these steps computed
    all: int = 0  # tokens of all requests
    drafts: int = 0
    blocks: list[int] = field(default_factory=list)

    def text(self) -> str:
        steps = (
            f"step {self.first_step}"
            if self.first_step == self.last_step
            else f"steps {self.first_step}-{self.last_step}"
        )
        parts = [f"{self.tokens} more tokens" if self.tokens != 1 else "1 more token"] if self.tokens else []
        if self.drafts:
            parts.append(f"{self.drafts} drafts verified")
        if self.chunks:
            parts.append(f"{self.chunks} chunks sent" if self.chunks != 1 else "1 chunk sent")
        if self.all:
            parts.append(f"its share of the steps: {self.own} of {self.all} tokens")
        if self.blocks:
            parts.append(f"new blocks {arguments({'': self.blocks}).removeprefix('=')}")
        return (f"{steps}: " if self.first_step else "") + ", ".join(parts)


class Narrator:
    """Describes one request. `feed` takes all events in causal order and gives the lines that are complete."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._root = root_of(request_id)
        self._step: tuple[int, int | None] | None = (
            None  # the last one in which it computed tokens: (pid of its engine, number)
        )
        self._first_token: tuple[int, int | None] | None = None  # the step that gave it
        self._engine: int | None = None  # with several engines: the number of the one that has it
        self._front_end: int | None = None
        self._several_servers = False
        self._sent: dict[
            str, Line
        ] = {}  # the step's messages to several API servers, until this request's own is received
        self._chunk_sent = False
        self._round: _Round | None = None
        self._waits_for: Line | None = None  # for the size of its step

    def feed(self, event: Event) -> Iterator[Line]:
        """The next event."""
        mine = (
            event.req == self._id
            or event.name in ("engine.dead", "engine.failed")
            or (event.name == "dp.engine_lost" and event.args["engine"] == self._engine)
            or (event.req is not None and event.phase != 8 and self._carries(event))
        )
        if event.req == self._id and event.name == "dp.routed":
            self._engine = event.args["engine"]
        if event.req == self._id and event.name == "zmq.request_sent":
            self._front_end = event.pid
        self._several_servers |= event.name == "api_server.spawned"
        if event.name == "sched.output" and (event.pid, event.step) == self._step:
            yield from self._step_size(event.args["total_tokens"])
        elif event.name in ("zmq.outputs_sent", "zmq.outputs_received"):
            yield from self._outputs(event)
        elif not mine:
            return
        elif event.name == "sched.scheduled" and (event.args["missing"] > 1 or not self._chunk_sent):
            yield from self.finish()
            self._step = (event.pid, event.step)
            self._waits_for = self._line(event)
        elif self._chunk_sent and event.name in _LOOP:
            self._add(event)
        else:
            yield from self.finish()
            yield self._line(event)
            if event.name == "sched.token" and self._first_token is None:
                self._first_token = (event.pid, event.step)
            self._chunk_sent |= event.name == "sse.chunk"

    def finish(self) -> Iterator[Line]:
        """What is still open."""
        if self._waits_for is not None:
            yield self._waits_for
        if self._round is not None and (text := self._round.text()):
            yield Line(self._round.start_ns, self._round.end_ns, 8 if self._round.first_step else 9, "", text)
        self._waits_for = self._round = None

    def _outputs(self, event: Event) -> Iterator[Line]:
        """A message with outputs, if it is the one with the first token. An engine with several API servers sends one to each."""
        sender = event.pid if event.name == "zmq.outputs_sent" else pid_of(event.cause)
        if (sender, event.step) != self._first_token or not event.args["num_outputs"] or self._chunk_sent:
            return
        if not self._several_servers:
            yield self._line(event)
        elif event.name == "zmq.outputs_sent":
            self._sent[event.ref] = self._line(event)
        elif event.pid == self._front_end:
            yield from filter(None, [self._sent.pop(event.cause or "", None)])
            yield self._line(event)

    def _carries(self, event: Event) -> bool:
        """Is it about the HTTP request that brought this one, or about the chunks that carry its tokens?"""
        heads = (
            "http.request",
            "http.response",
            "sse.chunk",
            "request.validated",
            "request.fanned_out",
            "request.sampling_params",
        )
        return event.name in heads and root_of(event.req or "") == self._root

    def _step_size(self, total: int) -> Iterator[Line]:
        if self._waits_for is not None:
            self._waits_for.text += f" (of {total} in the step)"
            yield self._waits_for
            self._waits_for = None
        elif self._round is not None:
            self._round.all += total

    def _line(self, event: Event) -> Line:
        words = [] if event.step is None else [f"step {event.step}:"]
        if event.name == "sched.scheduled":
            args = event.args
            words.append(
                f"{event.name} {args['num_tokens']} of {args['missing']} missing tokens, {args['num_computed']} computed before"
            )
            if args["new_blocks"]:
                words.append(arguments({"new_blocks": args["new_blocks"]}))
        else:
            words += [event.name, arguments(event.args)]
        return Line(event.ts, event.ts, event.phase, f"{event.proc} ({event.pid})", " ".join(words).rstrip())

    def _add(self, event: Event) -> None:
        now = self._round = self._round or _Round(event.ts, event.ts)
        now.end_ns = event.ts
        if event.name == "sched.scheduled":
            self._step, now.last_step = (event.pid, event.step), event.step or 0
            now.first_step = now.first_step or now.last_step
            now.own += event.args["num_tokens"]
            now.blocks += event.args["new_blocks"]
        elif event.name == "sched.token":
            now.tokens += event.args["num_tokens"]
        elif event.name == "spec.scheduled":
            now.drafts += event.args["num_tokens"]
            now.own += event.args["num_tokens"]
            now.blocks += event.args["new_blocks"]
        elif event.name == "sse.chunk":
            now.chunks += 1
