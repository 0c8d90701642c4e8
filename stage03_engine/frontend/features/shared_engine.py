"""The client of an engine that the launcher started: one of several API servers has no engine process of its own.

The launcher (stage02_server/features/api_servers) starts the engine and shakes hands with it. Each API server has a socket to the
launcher, and hears over it what the handshake said, when the engine ends, and where to find the one that takes its place. Orders and reports are
lines of JSON.
Source: vllm/v1/engine/core_client.py (client_addresses), vllm/v1/utils.py (APIServerProcessManager).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from pathlib import Path
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError, EngineStartError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient, AsyncMPClient
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.messages import EngineReady
from stage03_engine.mixins import load
from stagetrace import trace

JOIN = "join_front_end"
"""The call that tells a shared engine where an API server reads outputs (core/features/front_ends)."""
SEVERAL_ENGINES = "stage03_engine.frontend.features.data_parallel.several_front_ends:make_front_end"


class EngineUp(msgspec.Struct, tag=True):
    """Launcher -> API server: this engine has loaded its model."""

    engine: int
    ready: EngineReady


class EngineRefused(msgspec.Struct, tag=True):
    """Launcher -> API server: this engine cannot start. `again`: another attempt follows (EngineStarted)."""

    engine: int
    message: str
    again: bool = False


class AllConnected(msgspec.Struct, tag=True):
    """Launcher -> API server: every API server is connected to this engine. So all become ready at once."""

    engine: int


class EngineGone(msgspec.Struct, tag=True):
    """Launcher -> API server: the process of this engine has ended. `again`: it is started again (EngineStarted)."""

    engine: int
    exit_code: int
    again: bool = False


class EngineStarted(msgspec.Struct, tag=True):
    """Launcher -> API server: a process takes the place of this engine's dead one, with these addresses."""

    engine: int
    input_address: str
    output_address: str


class Stop(msgspec.Struct, tag=True):
    """Launcher -> API server: end, as after a signal; the second one ends running requests too."""

    why: str


class AreYouAlive(msgspec.Struct, tag=True):
    """Launcher -> API server: let your event loop answer, once you are ready (Alive)."""


class Connected(msgspec.Struct, tag=True):
    """API server -> launcher: it is connected to this engine."""

    engine: int


class EngineStalled(msgspec.Struct, tag=True):
    """API server -> launcher: this engine, at this address, has owed an answer for too long: end it."""

    engine: int
    input_address: str


class Alive(msgspec.Struct, tag=True):
    """API server -> launcher: it has become ready, or its event loop goes round still."""


class Failed(msgspec.Struct, tag=True):
    """API server -> launcher: it could not start, and why."""

    message: str
    exit_code: int


Order = EngineUp | EngineRefused | AllConnected | EngineGone | EngineStarted | AreYouAlive | Stop
Report = Connected | Alive | EngineStalled | Failed
encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Order).decode
decode_report = msgspec.json.Decoder(Report).decode


class SharedEngine(EngineProcess):
    """An engine process that the launcher started, as AsyncMPClient sees it. The methods are the same; what they wait for comes as orders."""

    def __init__(self, link: LauncherLink, engine: int, input_address: str, output_address: str) -> None:
        self._link, self._engine = link, engine
        self.identity = engine.to_bytes(2, "little")
        self.input_address, self.output_address = input_address, output_address
        self.up: Future[EngineReady] = Future()
        self.all_connected: Future[None] = Future()
        self.ended: Future[int] = Future()  # the exit code
        self.successor: Future[SharedEngine] = Future()  # what is started in its place after its death

    def shake_hands(self) -> EngineReady:
        """Blocks until the launcher tells what the engine said. Raises EngineStartError."""
        try:
            return self.up.result()
        except CancelledError:
            raise EngineStartError("this API server ends before the engine is ready") from None

    async def comes_up(self) -> bool:
        """Waits until it has loaded its model, which is True, or has ended."""
        up, ended = asyncio.wrap_future(self.up), asyncio.wrap_future(self.ended)
        either: set[asyncio.Future[Any]] = {up, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        refused = up.done() and up.exception() is not None
        return not refused and not ended.done()

    async def wait_for_others(self) -> None:
        """Tell that this API server is connected to the engine, and wait until all are."""
        self._link.tell(Connected(self._engine))
        await asyncio.wrap_future(self.all_connected)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread as soon as the launcher says that the process has ended."""
        self.ended.add_done_callback(lambda ended: callback(ended.result()))

    def shutdown(self) -> None:
        """The engine goes on: it is not ours. Whoever waits here is released."""
        self.up.cancel()
        self.all_connected.cancel()


class LauncherLink:
    """An API server's line to the launcher: orders come, reports go. It ends when the launcher ends, even by kill -9."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lines = sock, sock.makefile("rb")
        self.number = 0  # of this API server
        self.restarts = 0  # how many with this number have ended before
        self.engine_restarts = 0  # how many there were before this API server started
        self.coordinator: Path | None = None  # its folder, if there are several engines
        self.goes_on = True  # False once an engine is dead that is not started again
        self._engines: dict[int, SharedEngine] = {}  # the newest with each number
        self._taken: dict[int, SharedEngine] = {}  # those that the clients have

    def first_line(self) -> bytes:
        """What comes before all orders; empty if the launcher has gone."""
        return self._lines.readline()

    def add_engine(self, engine: int, input_address: str, output_address: str) -> SharedEngine:
        """An engine that this API server is to use. Of these addresses it gets its own ends; that of the outputs differs from its predecessors'."""
        inputs, outputs = f"{input_address}_{self.number}", f"{output_address}_{self.number}_{self.restarts}"
        made = self._engines[engine] = SharedEngine(self, engine, inputs, outputs)
        return made

    async def take_engine(self, engine: int) -> SharedEngine:
        """The engine with this number; each further call waits for the one that replaces the last. Raises EngineStartError if none will."""
        last = self._taken.get(engine)
        taken = self._engines[engine] if last is None else await asyncio.wrap_future(last.successor)
        self._taken[engine] = taken
        return taken

    def give_up(self, engine: int) -> None:
        """The engine that was taken last no longer answers: ask the launcher to end it."""
        address = self._taken[engine].input_address.removesuffix(f"_{self.number}")
        self.tell(EngineStalled(engine, address))

    def follow(
        self, on_stop: Callable[[str], None], on_question: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        """Obey orders from now on, in a thread; `on_question`: AreYouAlive. Calls `on_lost` when the launcher is gone."""

        def run() -> None:
            with contextlib.suppress(OSError):
                for line in self._lines:
                    order = decode_order(line)
                    if isinstance(order, Stop):
                        on_stop(order.why)
                    elif isinstance(order, AreYouAlive):
                        on_question()
                    else:
                        self._obey(order)
            on_lost()

        threading.Thread(target=run, name="launcher-link", daemon=True).start()

    def _obey(self, order: EngineUp | EngineRefused | AllConnected | EngineGone | EngineStarted) -> None:
        shared = self._engines[order.engine]
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            if isinstance(order, EngineUp):
                shared.up.set_result(order.ready)
            elif isinstance(order, AllConnected):
                shared.all_connected.set_result(None)
            elif isinstance(order, EngineStarted):
                next_one = self.add_engine(order.engine, order.input_address, order.output_address)
                next_one.all_connected.set_result(None)  # each server goes on with it as soon as it can
                shared.successor.set_result(next_one)
            else:
                self._obey_end(shared, order)

    def _obey_end(self, shared: SharedEngine, order: EngineRefused | EngineGone) -> None:
        if not order.again:
            self.goes_on = False
            with contextlib.suppress(InvalidStateError):
                shared.successor.set_exception(EngineStartError("it is not started again"))
        if isinstance(order, EngineGone):
            shared.ended.set_result(order.exit_code)
        else:
            shared.up.set_exception(EngineStartError(order.message))

    def tell(self, report: Report) -> None:
        """Send a report. One that nobody can read any more is dropped."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(report) + b"\n")


_link: LauncherLink | None = None


def use_link(link: LauncherLink) -> None:
    """This process is an API server, and this is its launcher."""
    global _link
    _link = link


def launcher_link() -> LauncherLink:
    """What `use_link` was told."""
    assert _link is not None, "the launcher sets the number of front ends, and says where the engines are"
    return _link


class SharedEngineClient(AsyncMPClient):
    """AsyncMPClient without the process: the engine serves all API servers, and stays when one ends."""

    def __init__(self, config: VllmConfig, engine: int = 0) -> None:
        super().__init__(config)
        self._index = engine

    def start_process(self) -> None:
        if trace.on:
            trace.emit("client.created", kind="SharedEngineClient", engine_ranks=[self._index])

    async def start(self) -> EngineReady:
        # What engines still answer to a server that ended is none of this one's calls.
        self._call_ids = itertools.count(launcher_link().restarts << 32)
        shared = await launcher_link().take_engine(self._index)
        while (
            launcher_link().restarts and not await shared.comes_up()
        ):  # who joins others waits for its successor, as they do
            shared = await launcher_link().take_engine(self._index)
        self._process = shared
        ended = asyncio.wrap_future(shared.ended)
        connecting = asyncio.create_task(self._connect(shared))
        try:
            waiting: set[asyncio.Future[Any]] = {ended, connecting}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():  # it would wait for the first message of an engine that is dead
                raise EngineStartError(f"it ended unexpectedly (exit code {ended.result()})")
            return connecting.result()
        finally:
            connecting.cancel()

    def stands_still(self) -> None:
        """It has owed an answer for too long. The launcher, which started it, ends it."""
        launcher_link().give_up(self._index)

    async def _connect(self, shared: SharedEngine) -> EngineReady:
        ready = await super().start()
        try:
            await self.call(JOIN, shared.output_address)
        except EngineDeadError as error:
            raise EngineStartError(str(error)) from error
        await shared.wait_for_others()
        return ready


def make_shared_client(config: VllmConfig) -> AsyncEngineCoreClient:
    """The client of this API server: of the one engine, or of several, with what the coordinator says about them."""
    link = launcher_link()
    if link.coordinator is None:
        return SharedEngineClient(config)
    return load(SEVERAL_ENGINES)(config, link, SharedEngineClient)
