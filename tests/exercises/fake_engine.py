"""The engine of exercise 3, played by its judge: real sockets, no process, no model, and a patience that counts rounds of the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import zmq
import zmq.asyncio
from judging import Judge

from stage03_engine import messages
from stage03_engine.config import CacheConfig, VllmConfig
from stage03_engine.messages import ENGINE_CORE_DEAD, EngineCoreOutput, EngineCoreOutputs, EngineReady, UtilityResult

T = TypeVar("T")
SETTINGS = VllmConfig(cache_config=CacheConfig(block_size=8))  # not those that every engine would have
IDENTITY = (0).to_bytes(2, "little")
READY = EngineReady(num_gpu_blocks=64, max_model_len=512)
MOST_POLLS = 400
ROUNDS, ROUND_SECONDS = 200, 0.002  # a busy machine makes the rounds longer, not fewer
BLOCKED_MS = 1000


class Popen:
    """A process that has ended with `returncode`, or has not. `before_end` is called when somebody asks."""

    def __init__(self, returncode: int | None = None, before_end: Callable[[], None] = lambda: None) -> None:
        self.returncode, self.pid, self._before_end = returncode, 0, before_end

    def poll(self) -> int | None:
        self._before_end()
        self._before_end = lambda: None
        return self.returncode


class Handshake:
    """Both ends of the handshake: the front end's socket, with which nobody can wait for ever, and the engine's."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self._context = judge, zmq.Context()
        self._socket, self._engine = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        for socket in (self._socket, self._engine):
            socket.linger, socket.rcvtimeo = 0, 0
        self._engine.setsockopt(zmq.IDENTITY, IDENTITY)
        self._socket.bind("inproc://handshake")
        self._engine.connect("inproc://handshake")
        self._polls = self.received = 0
        self.closed = self.answered = False
        self.after_init: list[Any] = []  # what the engine says when it has heard where the sockets are

    def say(self, message: Any) -> None:
        """The engine says something."""
        self._engine.send(messages.encode(message))

    def heard(self) -> list[Any]:
        """All that the engine was told."""
        found = []
        with suppress(zmq.Again):
            while True:
                found.append(messages.decode_handshake(self._engine.recv()))
        return found

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        self._polls += 1
        if self._polls > MOST_POLLS:
            waits = self.received > 0 and not self.answered and bool(self.after_init)
            self._judge.holds(
                "hello", not waits, "an EngineInit for the engine, which waits for it", "it was not sent yet"
            )
            self._judge.rejects("ended", "an EngineStartError", "a loop that asks poll() again and again")
        return self._socket.poll(1, flags)

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[bytes]:
        try:
            frames: list[bytes] = self._socket.recv_multipart()
        except zmq.Again:
            self._judge.rejects(
                "ended", "an EngineStartError", "a recv_multipart() that waits for ever: no message came"
            )
            raise
        self.received += 1
        return frames

    def send_multipart(self, frames: list[bytes], flags: int = 0, copy: bool = True, track: bool = False) -> None:
        self._judge.holds("hello", self.received > 0, "nothing sent before the hello was read", "a message without it")
        self._socket.send_multipart(frames)
        self.answered = True
        for message in self.after_init:
            self.say(message)

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def destroy(self) -> None:
        """Both ends."""
        self._context.destroy(linger=0)


def process_of(impl: ModuleType, handshake: Handshake, popen: Popen) -> Any:
    """The solution's EngineProcess, without the process."""
    process = object.__new__(impl.EngineProcess)
    process._config, process._directory, process._process = SETTINGS, Path("folder"), popen
    process.input_address, process.output_address = "ipc://folder/input", "ipc://folder/output"
    process.identity, process._handshake, process._context = IDENTITY, handshake, None
    return process


class Engine:
    """What a client sees of a running engine: it takes the place of its EngineProcess, and of what is behind the sockets."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.identity, self.pid, self.alive = IDENTITY, 0, True
        self.input_address, self.output_address = "inproc://input", "inproc://output"
        self._context = zmq.Context()
        self._inputs, self._outputs = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        self._inputs.setsockopt(zmq.IDENTITY, IDENTITY)
        self.client: Any = None
        self.connects_late, self.sends_early = False, list[EngineCoreOutputs]()
        self.asked, self.failed = threading.Event(), list[BaseException]()
        self._exit: Callable[[int], None] = lambda code: None

    def shake_hands(self) -> EngineReady:
        """What takes minutes with a large model."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            self._judge.rejects("free", "shake_hands() runs in a thread", "it runs on the event loop, which waits")
        for address in (self.input_address, self.output_address):
            self._judge.holds(
                "bound", self._is_bound(address), "both sockets are bound before shake_hands()", "one of them is not"
            )
        self._outputs.connect(self.output_address)
        for outputs in self.sends_early:
            self.send(outputs)
        if self.sends_early and hasattr(self.client, "_output"):
            self.client._output.poll(BLOCKED_MS)  # whoever has looked once is not told of these again
        if not self.connects_late:
            self.connect()
        self.asked.set()
        return READY

    def _is_bound(self, address: str) -> bool:
        with self._context.socket(zmq.ROUTER) as other:
            try:
                other.bind(address)
            except zmq.ZMQError as error:
                return error.errno == zmq.EADDRINUSE
            return False

    def connect(self) -> None:
        """Connect the engine's end of the input socket, and say who it is."""
        self._inputs.connect(self.input_address)
        self._inputs.send(b"")
        self.incoming = zmq.asyncio.Socket.from_socket(self._inputs)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        self._exit = callback

    def shutdown(self) -> None:
        """Nothing to end."""

    def send(self, outputs: EngineCoreOutputs) -> None:
        """One message on the output socket."""
        self._outputs.send(messages.encode(outputs))

    def answer(self, call_id: int, result: bool) -> None:
        """The answer to a call."""
        self.send(EngineCoreOutputs(utility_result=UtilityResult(call_id, result)))

    def die(self, with_notice: bool) -> None:
        """With its last words on the output socket, or killed: then only its end is seen, by a thread."""
        if with_notice:
            self._outputs.send_multipart([ENGINE_CORE_DEAD, b"out of memory"])
            return
        thread = threading.Thread(target=self._exit, args=(-9,))
        thread.start()
        thread.join()

    async def receive(self) -> list[bytes]:
        """The next message from the client."""
        return await self.soon("frames", "a message to the engine", self.incoming.recv_multipart())

    async def soon(self, key: str, expected: str, awaitable: Awaitable[T]) -> T:
        """What comes of something that need not wait: the solution is rejected if it still waits after many rounds."""
        task = asyncio.ensure_future(awaitable)
        for _ in range(ROUNDS):
            done, _ = await asyncio.wait({task}, timeout=ROUND_SECONDS)
            if self.failed:
                raise self.failed[0]
            if done:
                return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._judge.rejects(key, expected, "nothing comes")
        raise AssertionError


Scenario = Callable[[Any, Engine], Coroutine[Any, Any, None]]


def play(judge: Judge, impl: ModuleType, scenario: Scenario, started: bool = True) -> None:
    """Run a scenario with a new client of the solution's; `started`: start() has returned when it begins."""
    with _impatient_sockets():
        try:
            asyncio.run(_play(judge, impl, scenario, started))
        except zmq.Again as error:
            judge.rejects(
                "free", "nothing that blocks", "recv on a socket without a message: the loop stands still", error
            )


async def _play(judge: Judge, impl: ModuleType, scenario: Scenario, started: bool) -> None:
    engine, client = Engine(judge), impl.AsyncMPClient(VllmConfig())
    client._process, engine.client = engine, client
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _note(engine, context))
    try:
        if started:
            ready = await engine.soon("first", "start() returns", client.start())
            judge.equal("ready", READY, ready)
        await scenario(client, engine)
        if engine.failed:
            raise engine.failed[0]
    finally:
        with suppress(Exception):
            client.shutdown()
        engine.asked.set()  # whoever waits for it in a thread


def _note(engine: Engine, context: dict[str, Any]) -> None:
    """A callback of the loop raised: nobody else would hear of it."""
    if "handle" in context and "exception" in context:
        engine.failed.append(context["exception"])


@contextmanager
def _impatient_sockets() -> Iterator[None]:
    """Blocking calls on sockets that are made here end. All belong to one context, whoever makes them, so that both ends meet
    without a socket of the operating system, which the sandbox of `grade` refuses. Those that nobody has closed are closed
    afterwards: a context that is thrown away before its sockets would wait for them, for ever."""
    make, shared = zmq.Context.socket, zmq.Context()

    def socket(context: zmq.Context, kind: int, socket_class: Any = None, **options: Any) -> Any:
        made = make(shared, kind, socket_class or context._socket_class, **options)
        made.setsockopt(zmq.RCVTIMEO, BLOCKED_MS)
        made.setsockopt(zmq.SNDTIMEO, BLOCKED_MS)
        return made

    with mock.patch.object(zmq.Context, "socket", socket):
        try:
            yield
        finally:
            shared.destroy(linger=0)


def outputs(step: int) -> EngineCoreOutputs:
    """The outputs of an engine step."""
    return EngineCoreOutputs([EngineCoreOutput("r0", [step])], step=step)
