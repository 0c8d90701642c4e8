"""The path of every output token, from the scheduler to the client: when was it where?

A token is followed through four events that do not name it: the step's message over ZMQ, its receipt, the detokenizer, and the
chunk that carries it. The order of events shows which tokens each of them is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stagetrace.event import Event
from stagetrace.read.lanes import pid_of

MAX_STEPS_ON_THE_WAY = (
    1024  # a step whose outputs are never received (no ZMQ, or a process that died) is forgotten then
)


@dataclass(slots=True)
class Token:
    """Nanoseconds at which an output token was at each place; 0: not recorded."""

    engine_ns: int = 0  # the scheduler has it
    sent_ns: int = 0  # the engine's output thread sends it
    received_ns: int = 0  # the front end decoded the message
    text_ns: int = 0  # it is text
    client_ns: int = 0  # it left for the client


@dataclass(slots=True)
class Delivery:
    """The output tokens of one request. A request for several answers has no tokens: its children have them."""

    tokens: list[Token] = field(default_factory=list)
    arrival_ns: int = 0  # its HTTP request, which may be that of several requests of the engine; 0: not recorded
    params_ns: int = 0  # its sampling parameters were made
    whole: bool = False  # the tokens leave in one answer, not in chunks
    front_end: int = 0  # pid of the process that its tokens go to; 0: not recorded
    parent: str | None = None  # request whose chunks carry these tokens
    children: list[str] = field(default_factory=list)
    num_text: int = 0  # tokens that are text
    num_yielded: int = 0  # of those, handed to the caller of generate()
    num_client: int = 0  # of those, sent
    num_again: int = 0  # tokens that it has and that another engine, after the death of its own, computes once more
    num_before: int = 0  # tokens that it had when its engine got it

    def became_text(self, count: int, ts: int) -> None:
        """The next tokens are text; those that the engine did not record show up here."""
        while len(self.tokens) < self.num_text + count:
            self.tokens.append(Token())
        for token in self.tokens[self.num_text : self.num_text + count]:
            token.text_ns = ts
        self.num_text += count

    def left(self, ts: int) -> None:
        """A chunk took along all that the server had."""
        for token in self.tokens[self.num_client : self.num_yielded]:
            token.client_ns = ts
        self.num_client = max(self.num_client, self.num_yielded)


class Deliveries:
    """Follows the tokens of all requests; `feed` takes events in causal order."""

    def __init__(self) -> None:
        self.of_request: dict[str, Delivery] = {}
        self._steps: dict[tuple[int, int | None], list[tuple[Delivery, Token]]] = {}
        """(pid of the engine, step) -> tokens between it and a front end"""

    def feed(self, event: Event) -> None:
        """Process the next event."""
        handle = _HANDLERS.get(event.name)
        if handle is not None:
            handle(self, event)

    def forget(self, request_id: str) -> None:
        """The request has ended, and so have its children."""
        delivery = self.of_request.pop(request_id, None)
        for child in delivery.children if delivery is not None else ():
            self.forget(child)

    def delivery(self, request_id: str | None) -> Delivery:
        """What is known of one request; empty before its first event."""
        return self.of_request.setdefault(request_id or "", Delivery())

    def _adopt(self, parent: str, child: str) -> None:
        head, member = self.delivery(parent), self.delivery(child)
        head.children.append(child)
        member.parent, member.arrival_ns, member.params_ns = parent, head.arrival_ns, head.params_ns
        member.front_end = head.front_end

    def _family(self, request_id: str) -> list[Delivery]:
        delivery = self.delivery(request_id)
        return [delivery] + [member for child in delivery.children for member in self._family(child)]

    # One method per event

    def _arrived(self, event: Event) -> None:
        delivery = self.delivery(event.req)
        delivery.arrival_ns, delivery.front_end = event.ts, event.pid

    def _params(self, event: Event) -> None:
        for delivery in self._family(event.req or ""):
            delivery.params_ns = event.ts

    def _validated(self, event: Event) -> None:
        head = event.req or ""
        for number in range(1, event.args["prompts"]):  # the prompts of one HTTP request: ID-0 has the chunks of all
            self._adopt(head, f"{head.removesuffix('-0')}-{number}")

    def _fanned_out(self, event: Event) -> None:
        for number in range(event.args["children"]):
            self._adopt(event.req or "", f"{number}_{event.req}")

    def _routed(self, event: Event) -> None:
        """If the engine of a request died, the tokens that the front end did not receive are lost."""
        delivery = self.delivery(event.req)
        if event.args["again"]:
            received = sum(bool(token.received_ns) for token in delivery.tokens)
            del delivery.tokens[max(received, delivery.num_text) :]
        delivery.num_again = delivery.num_before = len(delivery.tokens)

    def _prefilled(self, event: Event) -> None:
        """The token of an engine that only computes prompts is nobody's."""
        delivery = self.delivery(event.req)
        del delivery.tokens[delivery.num_before :]

    def _token(self, event: Event) -> None:
        delivery = self.delivery(event.req)
        again = min(delivery.num_again, event.args["num_tokens"])
        delivery.num_again -= again
        tokens = [Token(event.ts) for _ in range(event.args["num_tokens"] - again)]
        delivery.tokens += tokens
        self._steps.setdefault((event.pid, event.step), []).extend((delivery, token) for token in tokens)
        if len(self._steps) > MAX_STEPS_ON_THE_WAY:
            del self._steps[next(iter(self._steps))]

    def _sent(self, event: Event) -> None:
        for _, token in self._steps.get((event.pid, event.step), ()):
            token.sent_ns = event.ts

    def _received(self, event: Event) -> None:
        """Each of several API servers gets a message with the tokens of its own requests."""
        engine = pid_of(event.cause)
        under_way = self._steps.pop((engine, event.step), []) if engine is not None else []
        left = [(delivery, token) for delivery, token in under_way if delivery.front_end not in (0, event.pid)]
        for delivery, token in under_way:
            if delivery.front_end in (0, event.pid):
                token.received_ns = event.ts
        if left and engine is not None:
            self._steps[engine, event.step] = left

    def _text(self, event: Event) -> None:
        self.delivery(event.req).became_text(event.args["num_tokens"], event.ts)

    def _yielded(self, event: Event) -> None:
        delivery = self.delivery(event.req)
        fanned_out = [self.delivery(child) for child in delivery.children if child.endswith(f"_{event.req}")]
        for member in [delivery, *fanned_out]:
            member.num_yielded = member.num_text

    def _left(self, event: Event) -> None:
        for delivery in self._family(event.req or ""):
            delivery.left(event.ts)
            delivery.whole = event.name == "http.response"


_HANDLERS: dict[str, Callable[[Deliveries, Event], None]] = {
    "http.request": Deliveries._arrived,
    "request.sampling_params": Deliveries._params,
    "request.validated": Deliveries._validated,
    "request.fanned_out": Deliveries._fanned_out,
    "dp.routed": Deliveries._routed,
    "dp.prefilled": Deliveries._prefilled,
    "sched.token": Deliveries._token,
    "zmq.outputs_sent": Deliveries._sent,
    "zmq.outputs_received": Deliveries._received,
    "request.detokenized": Deliveries._text,
    "generate.yield": Deliveries._yielded,
    "sse.chunk": Deliveries._left,
    "http.response": Deliveries._left,
}
