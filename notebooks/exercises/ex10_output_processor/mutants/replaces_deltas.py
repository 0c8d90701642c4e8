"""Misconception: a collector holds the newest output; but of deltas each is needed."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestOutputCollector as Reference
from stage03_engine.outputs import RequestOutput

REJECTED = "What a slow reader has not fetched is merged"


class RequestOutputCollector(Reference):
    def put(self, output: RequestOutput | Exception) -> None:
        if not isinstance(self._output, Exception):
            self._output = None
        super().put(output)
