"""Misconception: the error is in the queue, and whoever takes it out knows; the next one waits."""

from __future__ import annotations

from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.messages import EngineCoreOutputs

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "an EngineDeadError for whoever waits for outputs later"


class AsyncMPClient(Reference):
    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, Exception):
            raise item
        return item
