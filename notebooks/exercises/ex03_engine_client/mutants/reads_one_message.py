"""Misconception: the loop calls _read for each message; but the descriptor speaks up once for all that have come."""

from __future__ import annotations

import zmq

from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets, decode_outputs
from stage03_engine.frontend.engine_process import EngineProcess

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "Everything that has arrived is read"


class AsyncMPClient(Reference):
    def _read(self) -> None:
        if not self._output.EVENTS & zmq.POLLIN:
            return
        try:
            outputs = decode_outputs(self._output.recv_multipart())
        except EngineDeadError as error:
            self._stop_reading()
            return self._die(error)
        if outputs.utility_result is None:
            self._outputs.put_nowait(outputs)
        elif (call := self._calls.pop(outputs.utility_result.call_id, None)) is not None and not call.done():
            call.set_result(outputs.utility_result.result)
