"""The client of an engine that somebody else started: one of several API servers has no engine process of its own.

The launcher (stage02_server/features/api_servers) starts the engine, shakes hands with it, and tells every API server over a
socket of its own what the handshake said, and when the engine ends. Orders and reports are lines of JSON.
Source: vllm/v1/engine/core_client.py (client_addresses), vllm/v1/engine/utils.py (APIServerProcessManager).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from pathlib import Path

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineStartError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient, AsyncMPClient
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.messages import EngineReady
from stage03_engine.mixins import load
from stagetrace import trace

SEVERAL_ENGINES = "stage03_engine.frontend.features.data_parallel.several_front_ends:make_front_end"


class EngineUp(msgspec.Struct, tag=True):
    """Launcher -> API server: this engine has loaded its model."""

    engine: int
    ready: EngineReady


class EngineRefused(msgspec.Struct, tag=True):
    """Launcher -> API server: this engine cannot start."""

    engine: int
    message: str


class AllConnected(msgspec.Struct, tag=True):
    """Launcher -> API server: every API server has its connection to this engine, so that all are ready at once."""

    engine: int


class EngineGone(msgspec.Struct, tag=True):
    """Launcher -> API server: the process of this engine has ended."""

    engine: int
    exit_code: int


class Stop(msgspec.Struct, tag=True):
    """Launcher -> API server: end, as after a signal; the second one ends running requests too."""

    why: str


class Connected(msgspec.Struct, tag=True):
    """API server -> launcher: the connection to this engine is there."""

    engine: int


class Failed(msgspec.Struct, tag=True):
    """API server -> launcher: it could not start, and why."""

    message: str
    exit_code: int


Order = EngineUp | EngineRefused | AllConnected | EngineGone | Stop
Report = Connected | Failed
encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Order).decode
decode_report = msgspec.json.Decoder(Report).decode


class SharedEngine(EngineProcess):
    """An engine process that the launcher started, as AsyncMPClient sees it: the same methods, and what they wait for comes as orders."""

    def __init__(self, link: LauncherLink, engine: int, input_address: str, output_address: str) -> None:
        self._link, self._engine = link, engine
        self.identity = engine.to_bytes(2, "little")
        self.input_address, self.output_address = input_address, output_address
        self.up: Future[EngineReady] = Future()
        self.all_connected: Future[None] = Future()
        self._callback: Callable[[int], None] | None = None
        self._exit_code: int | None = None

    def shake_hands(self) -> EngineReady:
        """Blocks until the launcher tells what the engine said. Raises EngineStartError."""
        try:
            return self.up.result()
        except CancelledError:
            raise EngineStartError("this API server ends before the engine is there") from None

    async def wait_for_others(self) -> None:
        """Tell that this API server is connected to the engine, and wait until all are."""
        self._link.tell(Connected(self._engine))
        await asyncio.wrap_future(self.all_connected)

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread as soon as the launcher says that the process has ended."""
        self._callback = callback
        if self._exit_code is not None:
            callback(self._exit_code)

    def gone(self, exit_code: int) -> None:
        """The process has ended."""
        self._exit_code = exit_code
        if self._callback is not None:
            self._callback(exit_code)

    def shutdown(self) -> None:
        """The engine goes on: it is not ours. Whoever waits here is released."""
        self.up.cancel()
        self.all_connected.cancel()


class LauncherLink:
    """An API server's line to the launcher: orders come, reports go. It ends when the launcher ends, even by kill -9."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._lines = sock, sock.makefile("rb")
        self.number = 0  # of this API server
        self.coordinator: Path | None = None  # its folder, if there are several engines
        self.engines: dict[int, SharedEngine] = {}

    def first_line(self) -> bytes:
        """What comes before all orders; empty if the launcher has gone."""
        return self._lines.readline()

    def add_engine(self, engine: int, input_address: str, output_address: str) -> None:
        """An engine that this API server is to use. These addresses are this server's own ends."""
        self.engines[engine] = SharedEngine(self, engine, input_address, output_address)

    def follow(self, on_stop: Callable[[str], None], on_lost: Callable[[], None]) -> None:
        """Obey orders from now on, in a thread, and call `on_lost` when the launcher is gone."""

        def run() -> None:
            with contextlib.suppress(OSError):
                for line in self._lines:
                    order = decode_order(line)
                    if isinstance(order, Stop):
                        on_stop(order.why)
                    else:
                        self._obey(order)
            on_lost()

        threading.Thread(target=run, name="launcher-link", daemon=True).start()

    def _obey(self, order: EngineUp | EngineRefused | AllConnected | EngineGone) -> None:
        shared = self.engines[order.engine]
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            if isinstance(order, EngineUp):
                shared.up.set_result(order.ready)
            elif isinstance(order, EngineRefused):
                shared.up.set_exception(EngineStartError(order.message))
            elif isinstance(order, AllConnected):
                shared.all_connected.set_result(None)
            else:
                shared.gone(order.exit_code)

    def tell(self, report: Report) -> None:
        """Send a report. One that nobody can read any more is dropped."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(report) + b"\n")


_link: LauncherLink | None = None


def use_link(link: LauncherLink) -> None:
    """This process is an API server, and this is its launcher."""
    global _link
    _link = link


class SharedEngineClient(AsyncMPClient):
    """AsyncMPClient without the process: the engine is there for all API servers, and stays when one ends."""

    def __init__(self, config: VllmConfig, engine: int = 0) -> None:
        super().__init__(config)
        assert _link is not None, "the launcher sets the number of front ends, and says where the engines are"
        self._shared = _link.engines[engine]

    def start_process(self) -> None:
        if trace.on:
            trace.emit("client.created", kind="SharedEngineClient", engine_ranks=[self._shared.identity[0]])
        self._process = self._shared

    async def start(self) -> EngineReady:
        ready = await super().start()
        await self._shared.wait_for_others()
        return ready


def make_shared_client(config: VllmConfig) -> AsyncEngineCoreClient:
    """The client of this API server: of the one engine, or of several, with what the coordinator says about them."""
    assert _link is not None, "the launcher sets the number of front ends, and says where the engines are"
    if _link.coordinator is None:
        return SharedEngineClient(config)
    return load(SEVERAL_ENGINES)(config, _link.number, _link.coordinator, SharedEngineClient)
