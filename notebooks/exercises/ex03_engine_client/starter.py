"""The front end's half of the line between two processes: a handshake, two sockets, and nobody who waits for ever.

The engine is a process of its own. On the handshake's socket it says hello, hears where the two other sockets are, and says ready. From
then on requests go out on the input socket (ours is a ROUTER, the engine's a DEALER), and the outputs of each step come in on the output
socket (ours is a PULL, the engine's a PUSH).
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import zmq
import zmq.asyncio

from stage03_engine import messages
from stage03_engine.args.processes import exit_reason
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend.core_client import AsyncMPClient as ClientMechanics, decode_outputs, encode_message
from stage03_engine.frontend.engine_process import HELLO_SECONDS, POLL_MS, EngineProcess as ProcessMechanics
from stage03_engine.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineFailed,
    EngineHello,
    EngineInit,
    EngineReady,
    UtilityRequest,
)
from stagetrace import trace

__all__ = [  # given, for you to use
    "HELLO_SECONDS", "POLL_MS", "AbortRequests", "EngineDeadError", "EngineFailed", "EngineStartError", "UtilityRequest", "asyncio",
    "decode_outputs", "encode_message", "exit_reason", "messages",
]  # fmt: skip


def first_message(process: ProcessMechanics, hello: EngineHello) -> EngineInit:
    """Given: what the engine hears after its hello. The trace notes when."""
    init = EngineInit(process._config, process.input_address, process.output_address, trace.run_id)
    if trace.on:
        offset = time.monotonic_ns() - hello.monotonic_ns
        init.cause = trace.emit("engine.init_sent", cause=hello.cause, clock_offset_ns=offset)
    return init


class EngineProcess(ProcessMechanics):
    """The engine's process, seen from outside. `__init__`, which starts it, and `shutdown` are given.

    Given, for you to use:
    self._handshake          a ROUTER, bound: .poll(milliseconds) is true if a message is there; .recv_multipart() gives [the
                             sender's identity, a payload], .send_multipart([identity, payload]) answers; .close(linger=0)
    self.identity            the name of the engine's end on all sockets: two bytes
    self.alive               False once the process has ended
    self._process.returncode then its exit code; exit_reason(code) puts it into words
    messages.encode(message), messages.decode_handshake(payload)
    """

    def shake_hands(self) -> EngineReady:
        """Wait for the engine's EngineHello, HELLO_SECONDS at most; send it `first_message(self, hello)`; wait for its answer as long
        as it takes to load a model. Returns the EngineReady. However this ends, close the handshake's socket.

        Raises EngineStartError: if the answer is an EngineFailed, with its `message`; and whenever `_receive` does.
        """
        raise NotImplementedError

    def _receive(self, limit: float = math.inf) -> EngineHello | EngineInit | EngineReady | EngineFailed:
        """The next message on the handshake's socket, decoded. Look every POLL_MS milliseconds: if there is still none,

        - after `limit` seconds: EngineStartError("the engine process said nothing for ... s")
        - and the process has ended: EngineStartError("the engine process ended during start-up with " and the exit_reason);
          unless a message has come in that moment, between your look at the socket and your look at the process: take that.
        """
        raise NotImplementedError


def bind_sockets(context: zmq.Context, process: Any) -> tuple[Any, Any]:
    """(a ROUTER bound to process.input_address, a PULL bound to process.output_address).

    Neither has a limit to its queue (`set_hwm(0)`), nor waits when it is closed (`zmq.LINGER` 0). Set both before you bind.
    """
    raise NotImplementedError


class AsyncMPClient(ClientMechanics):
    """The engine, for an event loop with many callers. `__init__`, `start_process` and `shutdown` are given.

    Given, for you to use:
    self._process         the EngineProcess; None until start_process()
    self._outputs         an asyncio.Queue, empty: what get_output_async() hands out, EngineCoreOutputs and at last an exception
    self._calls           a dict, empty: the id of a call -> the asyncio.Future for which its caller waits
    self._call_ids        an iterator of new ids
    self._dead            None, or the EngineDeadError
    self._stop_reading    a function that shutdown() calls first; you set it
    self._report_death(loop, text)   makes the loop call self._die(EngineDeadError(text)); the one thing that may be called
                                     from another thread
    encode_message(type, payload, request_id)   the frames [type, payload] of a message, noted in the trace
    decode_outputs(frames)    the EngineCoreOutputs in a message. Raises EngineDeadError for the death notice
    """

    async def start(self) -> EngineReady:
        """Wait until the engine can serve, and read what it sends from then on. In this order:

        1. `self.start_process()`, if nobody has called it (a plain method: no await).
        2. Bind the sockets, in a new `zmq.Context()`. shutdown() needs it as `self._context`, the socket for input as
           `self._input`, made fit for asyncio by `zmq.asyncio.Socket.from_socket(socket)`; keep the other one, as it is, as
           `self._output`.
        3. `self._process.shake_hands()`. It blocks, perhaps for minutes: let it run in a thread.
        4. The engine's first message on the input socket is empty. A ROUTER drops what it sends to somebody of whom it has
           not heard: wait for this message, and throw it away.
        5. `self._process.on_exit(callback)`: a thread will call callback(exit code) when the process has ended. Report that
           death: "The engine process ended unexpectedly (exit code ...)."
        6. Have the event loop call `self._read` when the output socket's descriptor (`self._output.FD`) can be read
           (`loop.add_reader`, and for shutdown `loop.remove_reader`); and call it once for what has arrived meanwhile.

        Returns what shake_hands() returned. Raises EngineStartError, as it does.
        """
        raise NotImplementedError

    def _read(self) -> None:
        """Read every message that is there (`self._output.EVENTS & zmq.POLLIN`): the descriptor speaks up for the first only.

        Outputs go into the queue. One with a `utility_result` is an answer instead: its `result` goes to the call with its
        `call_id`, which is then forgotten. That call may be gone, or its caller (`future.done()`): then the answer is dropped.
        A death notice ends the reading.
        """
        raise NotImplementedError

    def _die(self, error: EngineDeadError) -> None:
        """Remember the error, and tell everybody who waits: for outputs, and for the answer to a call. It may come twice."""
        raise NotImplementedError

    async def _send(self, request_type: EngineCoreRequestType, payload: Any, request_id: str | None = None) -> None:
        """Send the engine three frames on the input socket: its identity, and the two of `encode_message`.

        That the engine is dead need not be noticed here: whoever waits hears of it from call() and get_output_async().
        """
        raise NotImplementedError

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """An ADD message: the request."""
        raise NotImplementedError

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """An ABORT message: an AbortRequests."""
        raise NotImplementedError

    async def call(self, method: str, *args: Any) -> Any:
        """A UTILITY message, a UtilityRequest with a new id, the method and its arguments; returns the result in the answer with the same id.

        Raises EngineDeadError: at once if the engine is dead, or when it dies before it has answered; and InvalidRequestError with the error of an
        answer that has one.
        """
        raise NotImplementedError

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs. Raises the EngineDeadError when the queue has come to it, and each time after that."""
        raise NotImplementedError
