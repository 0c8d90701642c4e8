"""The engine core as a process of its own (vllm/v1/engine/core.py, EngineCoreProc).

Three threads: the input thread decodes messages into a queue, the main thread runs the busy loop, the output thread encodes
and sends. So a step never waits for a socket, and msgpack work overlaps with the model (torch releases the interpreter lock).
A fourth only watches whether the parent is alive.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from stage03_engine import messages
from stage03_engine.args.log import enter_process, seconds_since_start
from stage03_engine.args.processes import end_with_parent
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core import EngineCore
from stage03_engine.errors import InvalidRequestError, StagesError
from stage03_engine.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineFailed,
    EngineHello,
    EngineInit,
    EngineReady,
)
from stage03_engine.plugins import find
from stage03_engine.tracing import open_trace, trace_message
from stagetrace import trace

logger = logging.getLogger(__name__)

_Message = EngineCoreRequest | messages.AbortRequests | messages.UtilityRequest
_DECODE: dict[EngineCoreRequestType, Callable[[bytes], _Message]] = {
    EngineCoreRequestType.ADD: messages.decode_add,
    EngineCoreRequestType.ABORT: messages.decode_abort,
    EngineCoreRequestType.UTILITY: messages.decode_utility,
}
INPUT_SECONDS = 0.05  # spent on messages between two steps: a burst of thousands must not hold up running requests


def make_core(config: VllmConfig) -> EngineCore:
    """The core for the configured model. Raises ConfigError."""
    return config.chosen("core", find("core", config.supported_tasks[0]) or EngineCore)(config)


class EngineCoreProc:
    """The engine core behind two sockets.

    Invariant: the front end always notices when this process ends: by the handshake's failure message, by the death notice
    on the output socket, or by the end of the process itself.
    """

    def __init__(self, init: EngineInit, identity: bytes, engine_index: int) -> None:
        self.engine_index = engine_index
        self.core = make_core(init.config)
        self.input_queue: queue.SimpleQueue = queue.SimpleQueue()
        self.output_queue: queue.SimpleQueue[EngineCoreOutputs | bytes] = queue.SimpleQueue()
        self.core.on_failure(self.fail)
        self._context = zmq.Context()
        connected = threading.Event()
        self._input_thread = threading.Thread(
            target=self._process_input_socket, args=(init.input_address, identity, connected), name="input", daemon=True
        )
        self._output_thread = threading.Thread(
            target=self._process_output_socket, args=(init.output_address,), name="output", daemon=True
        )
        self._input_thread.start()
        self._output_thread.start()
        connected.wait()
        if trace.on:
            trace.emit("engine.threads_started", threads=[self._input_thread.name, self._output_thread.name])

    def _process_input_socket(self, address: str, identity: bytes, connected: threading.Event) -> None:
        """Input thread: decode each message once, here, so that the busy loop only sees objects."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        socket.connect(address)
        socket.send(b"")  # a ROUTER can only address peers from which it has heard
        connected.set()
        try:
            while True:
                if received := self._decode(socket.recv_multipart()):
                    self.input_queue.put(received)
        except zmq.ContextTerminated:
            socket.close()

    def _decode(self, frames: list[bytes]) -> tuple[EngineCoreRequestType, _Message] | None:
        """Decode one message for the busy loop. A malformed one is None: it must not end the engine."""
        try:
            kind, payload = frames
            request_type = EngineCoreRequestType(kind)
            message = _DECODE[request_type](payload)
        except messages.MALFORMED as error:
            logger.warning("ignored a malformed message on the input socket: %s", error)
            return None
        if trace.on:
            req = getattr(message, "request_id", None)
            trace.emit("zmq.request_received", req=req, cause=message.cause, type=request_type.name)
        return request_type, message

    def _process_output_socket(self, address: str) -> None:
        """Output thread: encode and send; bytes instead of outputs are the death notice and end the thread."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(address)
        while True:
            outputs = self.output_queue.get()
            if isinstance(outputs, bytes):
                if outputs:
                    socket.send_multipart([ENGINE_CORE_DEAD, outputs])
                socket.close(linger=1000)
                return
            self._send(socket, outputs)

    @staticmethod
    def _send(socket: zmq.Socket, outputs: EngineCoreOutputs) -> None:
        if trace.on and outputs.outputs:
            size, count = len(messages.encode(outputs)), len(outputs.outputs)
            outputs.cause = trace.emit("zmq.outputs_sent", step=outputs.step, num_outputs=count, bytes=size)
        socket.send(messages.encode(outputs))

    def run_busy_loop(self) -> None:
        """Handle the messages that arrived, run a step, send its outputs; block only when there is nothing to do."""
        if trace.on:
            trace.emit("engine.busy_loop")
        while True:
            self._process_input_queue()
            if self.core.has_unfinished_requests:
                outputs = self.core.step()
                outputs.engine_index = self.engine_index
                self.output_queue.put(outputs)

    def _process_input_queue(self) -> None:
        """Handle the queued messages, those of a crowd between several steps; when idle, wait for one."""
        if not self.core.has_unfinished_requests and self.input_queue.empty():
            if trace.on:
                trace.flush()
            self._handle(*self.input_queue.get())
        end = time.monotonic() + INPUT_SECONDS
        while not self.input_queue.empty() and time.monotonic() < end:
            self._handle(*self.input_queue.get_nowait())

    def _handle(self, request_type: EngineCoreRequestType | None, message: object) -> None:
        if request_type is None:
            raise message if isinstance(message, Exception) else SystemExit
        if request_type == EngineCoreRequestType.ADD:
            assert isinstance(message, EngineCoreRequest)
            try:
                self.core.add_request(message)
            except ValueError as error:  # this request's fault: its neighbours go on
                self.output_queue.put(messages.refusal(message.request_id, error))
        elif isinstance(message, messages.UtilityRequest):
            self.output_queue.put(EngineCoreOutputs(utility_result=self._call(message)))
        else:
            assert isinstance(message, messages.AbortRequests)
            self.core.abort_requests(message.request_ids)
        if not self.core.has_unfinished_requests:  # no step will carry the new numbers to metrics and watchers
            self.output_queue.put(self.core.step())

    def _call(self, message: messages.UtilityRequest) -> messages.UtilityResult:
        try:
            return messages.UtilityResult(message.call_id, self.core.call(message.method, *message.args))
        except InvalidRequestError as error:
            return messages.UtilityResult(message.call_id, False, str(error))

    def stop(self) -> None:
        """From any thread: end the busy loop after the current step."""
        self.input_queue.put((None, None))

    def fail(self, why: str) -> None:
        """From any thread: a worker died, so end the busy loop with an error (vLLM: EXECUTOR_FAILED)."""
        self.input_queue.put((None, StagesError(why)))

    def shutdown(self, death_notice: str = "") -> None:
        """Send the death notice if there is one, and end the threads."""
        self.output_queue.put(death_notice.encode())
        self._output_thread.join(timeout=2.0)
        self._context.term()
        self.core.shutdown()


def _startup_handshake(socket: zmq.Socket, engine_index: int) -> EngineInit:
    """hello -> init. Trace events are held until the configuration arrives."""
    trace.hold(f"EngineCore_DP{engine_index}")
    cause = trace.emit("engine.hello", identity=engine_index) if trace.on else None
    socket.send(messages.encode(EngineHello(os.getpid(), time.monotonic_ns(), cause)))
    init = messages.decode_handshake(socket.recv())
    assert isinstance(init, EngineInit)
    open_trace(init.config, run_id=init.run_id)
    enter_process(f"EngineCore_DP{engine_index}", init.config)
    return init


def run_engine_core(handshake_address: str, engine_index: int) -> int:
    """Main function of the engine process; returns its exit code.

    SIGINT and SIGTERM are blocked in this process (see `signals_are_ours`): the front end decides when it ends.
    """
    engine: EngineCoreProc | None = None

    def stop() -> None:
        """Between two steps, or at once during start-up."""
        if engine is None:
            trace.close()
            os._exit(0)
        engine.stop()

    end_with_parent(Path(handshake_address.removeprefix("ipc://")).parent, stop)
    identity = engine_index.to_bytes(2, "little")
    context = zmq.Context()
    handshake = context.socket(zmq.DEALER)
    handshake.setsockopt(zmq.IDENTITY, identity)
    handshake.setsockopt(zmq.LINGER, 1000)
    handshake.connect(handshake_address)
    try:
        init = _startup_handshake(handshake, engine_index)
        engine = init.config.chosen("core_proc", EngineCoreProc)(init, identity, engine_index)
        gc.collect()
        gc.freeze()  # the model and the modules live as long as the process: the collector need not scan them again
        ready = EngineReady(engine.core.num_gpu_blocks, init.config.max_model_len)
        if trace.on:
            ready.cause = trace.emit("engine.ready", num_blocks=ready.num_gpu_blocks, max_model_len=ready.max_model_len)
        tokens = (ready.num_gpu_blocks - 1) * init.config.cache_config.block_size
        logger.info("Ready after %.1f s, with a KV cache for %d tokens", seconds_since_start(), tokens)
        handshake.send(messages.encode(ready))
        engine.run_busy_loop()
    except SystemExit:
        if engine is not None:
            engine.shutdown()
        if trace.on:
            trace.emit("engine.stopped")
    except Exception as error:
        _report_failure(error, engine, handshake)
        return 1
    finally:
        trace.close()
    return 0


def _is_out_of_memory(error: Exception) -> bool:
    """On CPUs, and when the size does not fit into 64 bits, torch raises a plain RuntimeError."""
    said = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "out of memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in said))


def _report_failure(error: Exception, engine: EngineCoreProc | None, handshake: zmq.Socket) -> None:
    """Report the reason to the front end: in the handshake during start-up, with the death notice later."""
    if engine is None and _is_out_of_memory(error):
        error = StagesError(f"there is not enough memory for this model: {str(error).strip() or type(error).__name__}")
    text = str(error) if isinstance(error, StagesError) else f"{type(error).__name__}: {error}"
    message = " ".join(text.split())
    if trace.on:
        trace.emit("engine.failed", message=trace_message(error))
    if not isinstance(error, StagesError):
        sys.excepthook(type(error), error, error.__traceback__)  # an error of ours: the traceback belongs in the log
    if engine is None:
        handshake.send(messages.encode(EngineFailed(message)))
        handshake.close()
        handshake.context.term()
    else:
        engine.shutdown(message)
