"""Misconception: the first message is empty, so there is nothing to read."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from stage03_engine.frontend.core_client import AsyncMPClient as Reference, bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.messages import EngineReady

__all__ = ["EngineProcess", "bind_sockets"]
REJECTED = "start() waits for the engine's first message"


class AsyncMPClient(Reference):
    async def start(self) -> EngineReady:
        if self._process is None:
            self.start_process()
        context = zmq.Context()
        inputs, self._output = bind_sockets(context, self._process)
        self._input, self._context = zmq.asyncio.Socket.from_socket(inputs), context
        ready = await asyncio.to_thread(self._process.shake_hands)
        loop = asyncio.get_running_loop()
        self._process.on_exit(
            lambda code: self._report_death(loop, f"The engine process ended unexpectedly (exit code {code}).")
        )
        loop.add_reader(self._output.FD, self._read)
        self._stop_reading = lambda: loop.remove_reader(self._output.FD)
        self._read()
        return ready
