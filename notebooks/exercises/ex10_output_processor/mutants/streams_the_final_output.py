"""Misconception: FINAL_ONLY means everything in each output; but its caller wants one."""

from __future__ import annotations

from msgspec.structs import replace

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestState as Reference
from stage03_engine.messages import FinishReason
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import RequestOutputKind

REJECTED = "With FINAL_ONLY there is one output, at the end."


class RequestState(Reference):
    def make_output(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> RequestOutput | None:
        params = self.request.sampling_params
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            self.request.sampling_params = replace(params, output_kind=RequestOutputKind.CUMULATIVE)
        return super().make_output(finish_reason, stop_reason)
