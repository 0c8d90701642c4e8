"""Misconception: the sum takes what the engine sent, and the cut comes afterwards."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import OutputEnd, RequestState as Reference
from stage03_engine.messages import EngineCoreOutput

REJECTED = "sum over the chosen tokens that count"


class RequestState(Reference):
    def append(self, output: EngineCoreOutput) -> OutputEnd | None:
        before = self.cumulative_logprob
        end = super().append(output)
        self.cumulative_logprob = before + sum(each.logprobs[0] for each in output.new_logprobs or [])
        return end
