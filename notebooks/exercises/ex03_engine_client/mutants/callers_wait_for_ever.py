"""Misconception: the queue of outputs tells of the death; whoever waits for an answer hears nothing."""

from __future__ import annotations

from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "an EngineDeadError for whoever waits for an answer"


class AsyncMPClient(Reference):
    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._outputs.put_nowait(error)
