"""Where the time of a request went: its TTFT and TPOT, split by cause.

Both are what the client waits: TTFT from its HTTP request until its first token left for it, TPOT from one token to the next, on average. At
each moment of a wait the awaited token (or the request that it will come from) is in exactly one place; a part is the time
that it spent there. So the parts add up to the whole, to the nanosecond. What happens meanwhile with other tokens costs the
client nothing and counts in no part: while a token is on its way to the client, the engine already computes the next.
What leaves together is awaited until its last token is there: a whole answer until the end of its last decode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stagetrace.read.deliveries import Token
from stagetrace.read.story import RequestStory


@dataclass(frozen=True)
class Part:
    """One place where a token can be waited for."""

    name: str
    phase: int
    meaning: str


PARTS = [
    Part("http", 6, "the HTTP request is parsed and validated, its sampling parameters are made"),
    Part("tokenize", 7, "its text becomes token ids, and it is registered"),
    Part("ipc in", 7, "its message goes to the engine process over ZMQ"),
    Part("grammar", 8, "in the engine: its grammar is compiled, so it cannot be admitted yet"),
    Part("queue", 8, "in the engine, not admitted: the step in progress ends, others go first, or blocks are missing"),
    Part("prefill", 8, "its prompt is computed or, after a preemption, what was lost"),
    Part("preempted", 8, "it was preempted, and waits to come back"),
    Part("decode", 8, "the steps that give one token after another, and the time between them; a whole beam search"),
    Part("ipc out", 9, "from the scheduler to the output thread, over ZMQ, decoded by the front end"),
    Part("detokenize", 9, "the token waits for its turn in the front end and becomes text"),
    Part("response", 9, "collector, generate(), JSON, and the chunk leaves for the client"),
    Part("unrecorded", 0, "events are missing: a process died, or a filter left them out"),
]
"""All parts, in the order in which a request passes through them."""

_PART_OF_SPAN = {"wait": "queue", "prefill": "prefill", "decode": "decode", "preempted": "preempted"}
Change = tuple[int, str]  # from this time on the awaited token is in this part


@dataclass
class Latency:
    """What the client of one request waited for. Times are nanoseconds."""

    request_id: str
    arrival_ns: int
    num_tokens: int = 0  # that reached the client
    streamed: bool = True  # else all tokens came at once, in the end: no TPOT
    ttft_ns: int | None = None  # None: no token reached the client
    ttft: dict[str, int] = field(default_factory=dict)  # part -> its share of ttft_ns
    gaps_ns: int | None = None  # from the first token to the last; None: fewer than two tokens, or not streamed
    gaps: dict[str, int] = field(default_factory=dict)  # part -> its share of gaps_ns
    reason: str | None = None

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first."""
        return None if self.gaps_ns is None else self.gaps_ns / (self.num_tokens - 1)

    @property
    def tpot(self) -> dict[str, float]:
        """Part -> its share of tpot_ns."""
        return {part: value / (self.num_tokens - 1) for part, value in self.gaps.items()}


def divide(start: int, end: int, first: str, changes: Iterable[Change]) -> dict[str, int]:
    """Split the time from `start` to `end`: it belongs to `first` until the first change, then to what each change says.

    The parts add up to end - start exactly. Changes out of order (clocks that disagree) count from the one before.
    """
    parts: dict[str, int] = {}
    now, part = start, first
    for time, following in changes:
        time = max(now, min(time, end))
        parts[part] = parts.get(part, 0) + time - now
        now, part = time, following
    parts[part] = parts.get(part, 0) + end - now
    return {name: value for name, value in parts.items() if value}


def of_request(request: RequestStory) -> Latency:
    """The latency of one request. Without a server (LLM, a lost file) its first and last events stand in for the client."""
    delivery = request.delivery
    arrival = delivery.arrival_ns or min(request.first.values(), default=0)
    latency = Latency(request.request_id, arrival, reason=request.reason)
    latency.streamed = not delivery.whole
    tokens = [(token, _end(token, delivery.arrival_ns > 0)) for token in delivery.tokens]
    tokens = [(token, end) for token, end in tokens if end]
    if not tokens:
        if "beam.finished" in request.first:
            _of_search(request, latency)
        return latency
    latency.num_tokens = len(tokens)
    engine = [(span.start_ns, _PART_OF_SPAN[span.kind]) for span in request.spans]
    end = tokens[0][1]
    token = [token for token, left in tokens if left == end][-1]  # the first chunk could not leave before this one
    latency.ttft_ns = end - arrival
    latency.ttft = divide(arrival, end, "http", _to_first(request, token, engine))
    if len(tokens) > 1 and latency.streamed:
        latency.gaps_ns = tokens[-1][1] - end
        latency.gaps = _between(tokens, engine)
    return latency


def _of_search(request: RequestStory, latency: Latency) -> None:
    """Beam search chooses its tokens in the end: until then its client waits for the search as a whole."""
    latency.num_tokens, first = request.num_output_tokens, request.first
    end = first.get("http.response") or first.get("sse.chunk")
    if end is not None and request.delivery.arrival_ns:
        parts = (("request.sampling_params", "tokenize"), ("beam.start", "decode"), ("beam.finished", "response"))
        changes = [(first[name], part) for name, part in parts if name in first]
        latency.ttft_ns = end - latency.arrival_ns
        latency.ttft = divide(latency.arrival_ns, end, "http", changes)


def _end(token: Token, has_client: bool) -> int:
    """When the client has it; 0: never."""
    return token.client_ns if has_client else token.text_ns or token.engine_ns


def _out(token: Token) -> list[Change]:
    """From the scheduler to the client. In one process there is no path between engine and front end."""
    changes = []
    if token.engine_ns:
        changes.append((token.engine_ns, "ipc out" if token.sent_ns or token.received_ns else "detokenize"))
    if token.received_ns:
        changes.append((token.received_ns, "detokenize"))
    return changes + ([(token.text_ns, "response")] if token.text_ns else [])


def _to_first(request: RequestStory, token: Token, engine: list[Change]) -> list[Change]:
    """The path of a request, and of the token that its first chunk waits for."""
    changes = [(request.delivery.params_ns, "tokenize")] if request.delivery.params_ns else []
    for name, part in (("zmq.request_sent", "ipc in"), ("zmq.request_received", "queue")):
        if name in request.first:
            changes.append((request.first[name], part))
    if "grammar.compiled" in request.first:
        engine = _with_grammar(engine, request.first["grammar.compiled"])
    if token.engine_ns:
        changes += [change for change in engine if change[0] < token.engine_ns]
    elif changes:
        changes.append((changes[-1][0], "unrecorded"))
    return changes + _out(token)


def _with_grammar(engine: list[Change], compiled: int) -> list[Change]:
    """What was taken for the queue was the compiler, until the request's grammar was ready."""
    before = [(time, "grammar" if part == "queue" else part) for time, part in engine if time < compiled]
    after = [change for change in engine if change[0] >= compiled]
    return [*before, (compiled, "queue"), *after] if before and before[-1][1] == "grammar" else engine


def _between(tokens: Sequence[tuple[Token, int]], engine: list[Change]) -> dict[str, int]:
    """The parts of the waits from the first token to the last; each token is awaited from when the one before it came."""
    total: dict[str, int] = {}
    place = 0
    for (before, start), (token, end) in itertools.pairwise(tokens):
        while place < len(engine) and engine[place][0] <= before.engine_ns:
            place += 1
        changes = []
        while place < len(engine) and engine[place][0] <= token.engine_ns:
            changes.append(engine[place])
            place += 1
        first = "decode" if token.engine_ns else "unrecorded"
        for part, value in divide(start, end, first, changes + _out(token)).items():
            total[part] = total.get(part, 0) + value
    return total


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this share of the values does not exceed; `values` are sorted and not empty."""
    return values[max(0, -int(-len(values) * percent // 100) - 1)]


@dataclass
class Distribution:
    """A latency over all requests. The means of the parts add up to `mean`; their percentiles do not add up."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, percent) for percent in (50, 90, 99)))


@dataclass
class Split:
    """A latency, and each part of it, over the requests that have it."""

    num_requests: int
    whole: Distribution
    parts: dict[str, Distribution]  # in the order of PARTS; those that are never above zero are left out


def split_ttft(latencies: Iterable[Latency]) -> Split | None:
    """TTFT by cause; None if no request got a token."""
    return _split([(one.ttft_ns, one.ttft) for one in latencies if one.ttft_ns is not None])


def split_tpot(latencies: Iterable[Latency]) -> Split | None:
    """TPOT by cause; None if no streamed request got two tokens."""
    return _split([(one.tpot_ns, one.tpot) for one in latencies if one.tpot_ns is not None])


def _split(waits: Sequence[tuple[float, dict[str, int] | dict[str, float]]]) -> Split | None:
    whole = Distribution.of(wait for wait, _ in waits)
    if whole is None:
        return None
    parts = {}
    for part in PARTS:
        values = [shares.get(part.name, 0) for _, shares in waits]
        distribution = Distribution.of(values) if any(values) else None
        if distribution is not None:
            parts[part.name] = distribution
    return Split(len(waits), whole, parts)
