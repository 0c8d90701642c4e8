"""How the front end reaches the engine core: a small interface, and the client that the server uses.

AsyncMPClient talks to an engine process from an event loop (for `AsyncLLM`, and so for the server). Features have the other
clients: InprocClient for `LLM`, SyncMPClient for `LLM(multiprocess=True)`, AsyncInprocClient for `serve --in-process`.
Source: vllm/v1/engine/core_client.py (EngineCoreClient, AsyncMPClient).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from stage03_engine import messages
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, InvalidRequestError
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.messages import (
    ENGINE_CORE_DEAD,
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineReady,
    UtilityRequest,
)
from stagetrace import trace

logger = logging.getLogger(__name__)


class EngineCoreClient(ABC):
    """For a caller without an event loop."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop requests and free their blocks."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine core's methods that are not part of serving requests; False if it did nothing. Raises
        InvalidRequestError if it refuses."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step; only call it while requests are unfinished. Raises EngineDeadError."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""


class AsyncEngineCoreClient(ABC):
    """For a caller on an event loop."""

    def start_process(self) -> None:  # noqa: B027 - a client without a process has nothing to start
        """Start the engine without waiting for it."""

    @abstractmethod
    async def start(self) -> EngineReady:
        """Wait until the engine can serve. Raises EngineStartError."""

    @abstractmethod
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    @abstractmethod
    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop requests and free their blocks."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine core's methods that are not part of serving requests; False if it did nothing.

        Raises EngineDeadError, also if the engine dies during the call, and InvalidRequestError if it has no such method, or that refuses.
        """

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs of the next step. Raises EngineDeadError."""

    def engine_of(self, request_id: str) -> int | None:
        """The number of the engine that has this request; None if there is one engine, or none has it."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""


def encode_message(request_type: EngineCoreRequestType, payload: Any, request_id: str | None = None) -> list[bytes]:
    """The two frames of an input message; its trace reference becomes the payload's cause."""
    if trace.on and hasattr(payload, "cause"):
        kind = request_type.name
        payload.cause = trace.emit("zmq.request_sent", req=request_id, type=kind, bytes=len(messages.encode(payload)))
    return [request_type.value, messages.encode(payload)]


def decode_outputs(frames: list[bytes]) -> EngineCoreOutputs:
    """Decode an output message; a malformed one counts as empty. Raises EngineDeadError for the engine's death notice."""
    if len(frames) == 2 and frames[0] == ENGINE_CORE_DEAD:
        raise EngineDeadError(f"The engine stopped: {frames[1].decode(errors='replace')}")
    try:
        outputs = messages.decode_outputs(frames[0])
    except messages.MALFORMED as error:
        logger.warning("ignored a malformed message on the output socket: %s", error)
        return EngineCoreOutputs()
    if trace.on:
        count = len(outputs.outputs)
        trace.emit("zmq.outputs_received", step=outputs.step, cause=outputs.cause, num_outputs=count)
    return outputs


def bind_sockets(context: zmq.Context, process: EngineProcess) -> tuple[Any, Any]:
    """The front end's ends: ROUTER for input, PULL for output, both bound before the engine connects."""
    input_socket, output_socket = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    for socket, address in ((input_socket, process.input_address), (output_socket, process.output_address)):
        socket.set_hwm(0)  # never drop, never block: the scheduler's queue is the only queue that may grow
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
    return input_socket, output_socket


class AsyncMPClient(AsyncEngineCoreClient):
    """An engine process, driven from an event loop.

    Whenever the output socket has something, the event loop reads it into a queue. The monitor thread puts an EngineDeadError into
    the same queue when the process ends, so a waiter only has to watch this queue.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._process: EngineProcess | None = None
        self._context: zmq.Context | None = None
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._stop_reading: Any = lambda: None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._dead: EngineDeadError | None = None
        self._call_ids = itertools.count()

    def start_process(self) -> None:
        if trace.on:
            trace.emit("client.created", kind="AsyncMPClient", engine_ranks=[0])
        self._process = EngineProcess(self._config)

    async def start(self) -> EngineReady:
        if self._process is None:
            self.start_process()
        process = self._process
        assert process is not None
        context = zmq.Context()
        inputs, self._output = bind_sockets(context, process)
        self._input, self._context = zmq.asyncio.Socket.from_socket(inputs), context
        ready = await asyncio.to_thread(process.shake_hands)
        await self._input.recv_multipart()  # the engine's empty first message: the ROUTER knows its peer from now on
        loop = asyncio.get_running_loop()
        process.on_exit(
            lambda code: self._report_death(loop, f"The engine process ended unexpectedly (exit code {code}).")
        )
        # A step's outputs come in one message: zmq.asyncio's future and a task per message would take longer than reading it.
        loop.add_reader(self._output.FD, self._read)
        self._stop_reading = partial(loop.remove_reader, self._output.FD)
        self._read()
        return ready

    def _report_death(self, loop: asyncio.AbstractEventLoop, message: str) -> None:
        """Report the death from the monitor thread."""
        try:
            loop.call_soon_threadsafe(self._die, EngineDeadError(message))
        except RuntimeError:
            pass  # the loop is closed: the server is shutting down

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._outputs.put_nowait(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    def _read(self) -> None:
        """Read all that is there: ZMQ's descriptor tells of the first message only."""
        while self._output.EVENTS & zmq.POLLIN:
            try:
                outputs = decode_outputs(self._output.recv_multipart())
            except EngineDeadError as error:
                self._stop_reading()
                return self._die(error)
            if outputs.utility_result is None:
                self._outputs.put_nowait(outputs)
            elif (call := self._calls.pop(outputs.utility_result.call_id, None)) is not None and not call.done():
                if outputs.utility_result.error is not None:
                    call.set_exception(InvalidRequestError(outputs.utility_result.error))
                else:
                    call.set_result(outputs.utility_result.result)

    async def _send(self, request_type: EngineCoreRequestType, payload: Any, request_id: str | None = None) -> None:
        assert self._process is not None
        await self._input.send_multipart([self._process.identity, *encode_message(request_type, payload, request_id)])

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self._send(EngineCoreRequestType.ADD, request, request.request_id)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self._send(EngineCoreRequestType.ABORT, AbortRequests(request_ids))

    async def call(self, method: str, *args: Any) -> Any:
        if self._dead is not None:
            raise self._dead
        call_id = next(self._call_ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._send(EngineCoreRequestType.UTILITY, UtilityRequest(call_id, method, args=list(args)))
        return await self._calls[call_id]

    async def get_output_async(self) -> EngineCoreOutputs:
        item = await self._outputs.get()
        if isinstance(item, Exception):
            self._outputs.put_nowait(item)  # later calls raise it again
            raise item
        return item

    def shutdown(self) -> None:
        self._stop_reading()
        if self._process is not None:
            self._process.shutdown()
        if self._context is not None:
            self._input.close()
            self._context.destroy(linger=0)
            self._context = None


def make_client(config: VllmConfig) -> AsyncEngineCoreClient:
    """AsyncMPClient, unless a setting puts another client into its place."""
    return config.chosen("client", AsyncMPClient)(config)
