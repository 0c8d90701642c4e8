"""Misconception: an empty socket and then an ended process: nothing can come any more. But it may have come in between."""

from __future__ import annotations

import math
from typing import Any

from stage03_engine import messages
from stage03_engine.args.processes import exit_reason
from stage03_engine.errors import EngineStartError
from stage03_engine.frontend.core_client import AsyncMPClient, bind_sockets
from stage03_engine.frontend.engine_process import POLL_MS, EngineProcess as Reference

__all__ = ["AsyncMPClient", "bind_sockets"]
REJECTED = "What the engine said before it ended counts"


class EngineProcess(Reference):
    def _receive(self, limit: float = math.inf) -> Any:
        while not self._handshake.poll(POLL_MS):
            if not self.alive:
                raise EngineStartError(f"ended with {exit_reason(self._process.returncode)}")
            if limit < 1:
                return super()._receive(limit)
        return messages.decode_handshake(self._handshake.recv_multipart()[1])
