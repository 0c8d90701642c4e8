"""Misconception: every step makes a delta, and some are empty; so a client gets tokens without the text that they are."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestState as Reference
from stage03_engine.messages import FinishReason
from stage03_engine.outputs import CompletionOutput, RequestOutput
from stage03_engine.sampling_params import RequestOutputKind

REJECTED = "A delta without new text is not sent"


class RequestState(Reference):
    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        made = super().make_output(finish_reason, stop_reason)
        delta = self.request.sampling_params.output_kind == RequestOutputKind.DELTA
        if made is not None or not delta or len(self.token_ids) < self._num_given + self._stream_interval:
            return made
        logprobs = None if self.logprobs is None else self.logprobs[self._num_given :]
        empty = CompletionOutput(0, "", self.token_ids[self._num_given :], logprobs)
        self._num_given = len(self.token_ids)
        return RequestOutput(self.request.request_id, self.prompt, self.request.prompt_token_ids, [empty])
