"""Misconception: what a step brought has gone out when the step is over; so the tokens of a held-back text never do."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestState as Reference
from stage03_engine.messages import FinishReason
from stage03_engine.outputs import RequestOutput

REJECTED = "nothing is lost and nothing comes twice"


class RequestState(Reference):
    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        made = super().make_output(finish_reason, stop_reason)
        if self._stream_interval == 1:
            self._num_given = len(self.token_ids)
        return made
