"""Misconception: the engine said hello, so it will say ready; until then, wait."""

from __future__ import annotations

import math
from typing import Any

from stage03_engine import messages
from stage03_engine.frontend.core_client import AsyncMPClient, bind_sockets
from stage03_engine.frontend.engine_process import POLL_MS, EngineProcess as Reference

__all__ = ["AsyncMPClient", "bind_sockets"]
REJECTED = "an EngineStartError"


class EngineProcess(Reference):
    def _receive(self, limit: float = math.inf) -> Any:
        while not self._handshake.poll(POLL_MS):
            pass
        return messages.decode_handshake(self._handshake.recv_multipart()[1])
