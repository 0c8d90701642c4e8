"""A request of one of several engines: how much of its answer has been passed on, and whether it can run again on another engine."""

from __future__ import annotations

from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stage03_engine.sampling_params import RequestOutputKind

LOST = "engine_lost"
"""Key in `EngineCoreOutput.result` of a request that ends because its engine died."""
_DIED = "The engine that wrote this answer has died; send the request again."
_DIFFERS = (
    "The engine that wrote this answer has died, and another one continues it differently; send the request again."
)


def lost(request_id: str, why: str = _DIED) -> EngineCoreOutput:
    """The last output of a request that cannot be continued."""
    return EngineCoreOutput(request_id, [], None, FinishReason.ERROR, error=why, result={LOST: True})


class InFlight:
    """One request of an engine core.

    A request that runs again with the same seed gets the same tokens. A stream does not run again once something has been passed on, because
    the client may have it. An answer that is sent as a whole does. The front end has already detokenized its first tokens: when they
    come again, they are compared with those and not passed on.
    """

    __slots__ = ("_is_whole", "_num_again", "_tokens", "engine", "has_begun", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.engine: int | None = None  # its number; None while the request has no engine
        self.has_begun = False  # has something been passed on?
        self._is_whole = request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        self._tokens: list[int] = []  # passed on so far, if the answer is sent as a whole
        self._num_again = 0  # how many of them have come from the present engine

    @property
    def can_run_again(self) -> bool:
        """Has the client received nothing yet?"""
        return self._is_whole or not self.has_begun

    def runs_again(self) -> None:
        """The request begins again, on another engine."""
        self.engine, self._num_again = None, 0

    def admit(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """The part of this output that is new; None if nothing is."""
        if self._num_again < len(self._tokens):
            return self._new_part(output)
        self.has_begun = True
        if self._is_whole:
            self._take(output.new_token_ids)
        return output

    def _take(self, token_ids: list[int]) -> None:
        self._tokens += token_ids
        self._num_again = len(self._tokens)

    def _new_part(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        known = self._tokens[self._num_again : self._num_again + len(output.new_token_ids)]
        count = len(known)
        if output.new_token_ids[:count] != known:
            return lost(output.request_id, _DIFFERS)
        self._num_again += count
        output.new_token_ids = output.new_token_ids[count:]
        output.new_logprobs = output.new_logprobs and output.new_logprobs[count:]
        output.queued_seconds = output.result = None  # they came with the first token
        if not output.new_token_ids and output.finish_reason is None:
            return None
        self._take(output.new_token_ids)
        return output
