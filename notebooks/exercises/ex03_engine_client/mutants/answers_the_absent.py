"""Misconception: whoever called waits for the answer; but a client may have left, and its future is done."""

from __future__ import annotations

import zmq

from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets, decode_outputs
from stage03_engine.frontend.engine_process import EngineProcess

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "An answer for which nobody waits any more disturbs nobody"


class AsyncMPClient(Reference):
    def _read(self) -> None:
        while self._output.EVENTS & zmq.POLLIN:
            try:
                outputs = decode_outputs(self._output.recv_multipart())
            except EngineDeadError as error:
                self._stop_reading()
                return self._die(error)
            if outputs.utility_result is None:
                self._outputs.put_nowait(outputs)
            elif outputs.utility_result.call_id in self._calls:
                self._calls.pop(outputs.utility_result.call_id).set_result(outputs.utility_result.result)
