"""Misconception: an interval of n is n tokens, for the first output too; then the client sees nothing for n steps."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestState as Reference
from stage03_engine.messages import FinishReason
from stage03_engine.outputs import RequestOutput

REJECTED = "when stream_interval further tokens have come"


class RequestState(Reference):
    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        if finish_reason is None and len(self.token_ids) < self._num_given + self._stream_interval:
            return None
        return super().make_output(finish_reason, stop_reason)
