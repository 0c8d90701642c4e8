"""A request of one of several engines: how much of its answer has been passed on, and how it goes on when its engine dies."""

from __future__ import annotations

from stage03_engine.frontend.features.data_parallel.balancing import Choice
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stagetrace import trace

LOST = "engine_lost"
"""Key in `EngineCoreOutput.result` of a request that ends because of a death. The value is the HTTP status of its error."""
MOST_DEATHS = 2
"""A request that was on so many engines when they died is not sent to another one: it may be what they died of."""
_DIFFERS = (
    "The engine that wrote this answer has died, and another one continues it differently; send the request again."
)
_POISON = f"This request was running on {MOST_DEATHS} engines when they died; it is not tried on another one."


def _lost(request_id: str, why: str, status: int) -> EngineCoreOutput:
    """The last output of a request that does not go on."""
    return EngineCoreOutput(request_id, [], None, FinishReason.ERROR, error=why, result={LOST: status})


class InFlight:
    """One request of an engine core.

    When its engine dies, it begins again on another one, from its prompt. It has a seed, its own or one that the client of the engines gave it, so
    the same tokens come again. Those that have been passed on are compared and not passed on twice: the reader of a stream notices a
    pause and nothing else. An answer that comes out differently ends with an error.
    """

    __slots__ = ("_num_again", "_tokens", "choice", "num_deaths", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.choice: Choice | None = None  # None while the request has no engine
        self.num_deaths = 0  # engines that died while they had it
        self._tokens: list[int] = []  # passed on so far
        self._num_again = 0  # how many of them have come from the present engine

    @property
    def engine(self) -> int | None:
        """The number of its engine, if it has one."""
        return None if self.choice is None else self.choice.engine

    @property
    def has_begun(self) -> bool:
        """Has its present engine given a token?"""
        return self._num_again > 0

    @property
    def tokens(self) -> list[int]:
        """Those that its present engine has given."""
        return self._tokens[: self._num_again]

    @property
    def can_run_again(self) -> bool:
        """Has it been on fewer dead engines than would make it a suspect?"""
        return self.num_deaths < MOST_DEATHS

    def engine_died(self) -> None:
        """Its engine is dead. Wherever it goes now, it begins again."""
        self.num_deaths += 1
        self.choice, self._num_again = None, 0

    def refuse(self) -> EngineCoreOutput:
        """The last output of a request that cannot run again."""
        if trace.on:
            trace.emit("dp.refused", req=self.request.request_id, deaths=self.num_deaths)
        return _lost(self.request.request_id, _POISON, 500)

    def admit(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The part of this output that is new; None if nothing is."""
        if self._num_again < len(self._tokens):
            return self._new_part(output)
        self._tokens += output.new_token_ids
        self._num_again = len(self._tokens)
        return output

    def _new_part(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        known = self._tokens[self._num_again : self._num_again + len(output.new_token_ids)]
        count = len(known)
        if output.new_token_ids[:count] != known:
            return self._differs(output, known)
        if self._num_again == 0:
            output.queued_seconds = output.result = None  # what came with the first token has been passed on
        self._num_again += count
        if self._num_again < len(self._tokens) and output.finish_reason is not None and output.error is None:
            return self._differs(output, known)  # it ends too early
        if trace.on and self._num_again == len(self._tokens):
            trace.emit("dp.resumed", req=output.request_id, engine=self.engine, tokens=self._num_again)
        output.new_token_ids = output.new_token_ids[count:]
        output.new_logprobs = output.new_logprobs and output.new_logprobs[count:]
        self._tokens += output.new_token_ids
        self._num_again += len(output.new_token_ids)
        return output if output.new_token_ids or output.finish_reason is not None else None

    def _differs(self, output: EngineCoreOutput, known: list[int]) -> EngineCoreOutput:
        if trace.on:
            pairs = enumerate(zip(output.new_token_ids, known))
            place = next((self._num_again + i for i, (new, old) in pairs if new != old), self._num_again)
            trace.emit("dp.differed", req=output.request_id, engine=self.engine, token=place)
        return _lost(output.request_id, _DIFFERS, 503)
