"""Misconception: the newest wins; so an output that was still on its way hides that the engine has died."""

from __future__ import annotations

from stage02_server.features.logprobs.answer import add_token  # noqa: F401
from stage03_engine.frontend.output_processor import *  # noqa: F403
from stage03_engine.frontend.output_processor import RequestOutputCollector as Reference
from stage03_engine.outputs import RequestOutput

REJECTED = "An exception replaces a waiting output, nothing replaces it"


class RequestOutputCollector(Reference):
    def put(self, output: RequestOutput | Exception) -> None:
        if isinstance(self._output, Exception):
            self._output = None
        super().put(output)
