"""Misconception: whoever called first gets the first answer."""

from __future__ import annotations

import zmq

from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets, decode_outputs
from stage03_engine.frontend.engine_process import EngineProcess

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "The answer to a call goes to the call with its id"


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
            elif self._calls:
                call = self._calls.pop(next(iter(self._calls)))
                if not call.done():
                    call.set_result(outputs.utility_result.result)
