"""Misconception: a stop string cuts the text, and the tokens are what the engine sent."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import OutputEnd, RequestState as Reference
from stage03_engine.messages import EngineCoreOutput

REJECTED = "Tokens after the one that completed a stop string do not count"


class RequestState(Reference):
    def append(self, output: EngineCoreOutput) -> OutputEnd | None:
        before = len(self.token_ids)
        end = super().append(output)
        self.token_ids[before:] = output.new_token_ids
        return end
