"""Misconception: whatever ended by its text must be aborted; but the engine may have ended it in the same step, and knows it no more."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import OutputProcessor as Reference
from stage03_engine.messages import EngineCoreOutput
from stage03_engine.outputs import RequestOutput

REJECTED = "The engine must abort a request that ended because of its text"


class OutputProcessor(Reference):
    def process_outputs(
        self, outputs: list[EngineCoreOutput], stats: IterationStats
    ) -> tuple[list[RequestOutput], list[str]]:
        before = dict(self.request_states)
        made, _ = super().process_outputs(outputs, stats)
        return made, [name for name in before if name not in self.request_states]
