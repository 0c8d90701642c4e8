"""The head's side of headless nodes: engines on other machines, among those of `DPLBAsyncMPClient`.

Each machine opens one connection to `NodeHub`, over which everything goes: who joins, which engine is to start or has ended, and what the
engines' own sockets carry. To `AsyncMPClient` an engine there looks like one here: `RemoteEngine` has the interface of EngineProcess, and the
hub stands in for it at the front end's sockets. (In vLLM a node that is lost ends the head.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial

import zmq

from stage03_engine.args.processes import private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.frontend.features.data_parallel.engine import DPAsyncMPClient
from stage03_engine.frontend.features.data_parallel.nodes.messages import (
    EQUAL,
    EngineGone,
    EngineRefused,
    EngineUp,
    StartEngine,
    decode_report,
    engines_named,
    launch_frame,
    read_launch,
)
from stage03_engine.frontend.features.data_parallel.restart import NodeLostError
from stage03_engine.messages import EngineReady
from stage03_engine.nodes.hub import LAST_WORDS_MS, Hub, drain, join_seconds
from stage03_engine.nodes.messages import Bye, Join
from stage03_engine.nodes.sameness import facts_of

logger = logging.getLogger(__name__)


class RemoteEngine(EngineProcess):
    """One start of an engine on another machine, as AsyncMPClient sees it. `up` has the result of the handshake there."""

    def __init__(self, hub: NodeHub, engine: int, launch: int, folder: str) -> None:
        self._hub, self.engine, self.launch = hub, engine, launch
        self.identity = engine.to_bytes(2, "little")
        self.input_address = f"ipc://{folder}/input{launch}"
        self.output_address = f"ipc://{folder}/output{launch}"
        self.up: Future[EngineReady] = Future()
        self.gone: Future[int] = Future()
        self.node_lost = ""  # why, if its machine is gone

    def shake_hands(self) -> EngineReady:
        """Blocks until the engine is up there. Raises EngineStartError."""
        return self.up.result()

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit code)` from a thread as soon as the process, or its machine, is gone."""
        self.gone.add_done_callback(lambda gone: callback(gone.result()))

    def shutdown(self) -> None:
        """Nobody here uses the engine any longer: a caller that waits for it is released. The node ends its process at
        the next StartEngine for this number, or at the Bye."""
        with contextlib.suppress(InvalidStateError):
            self.up.set_exception(EngineStartError("the server ends before the engine is ready"))
        self._hub.forget(self)


@dataclass
class _Ends:
    """The hub's ends of the sockets between the front end and one engine."""

    inputs: zmq.Socket
    outputs: zmq.Socket
    engine: RemoteEngine = field(repr=False)


class NodeHub(Hub[EngineUp | EngineRefused | EngineGone]):
    """The head's side of the engines on other machines."""

    FLAGS = "--data-parallel-address, --data-parallel-rpc-port"

    def __init__(self, config: VllmConfig) -> None:
        """Raises StagesError if it cannot listen."""
        self._parallel = parallel = config.data_parallel_config
        super().__init__(config, f"tcp://{parallel.head_address}", facts_of(config, EQUAL))
        self._engines_elsewhere = range(parallel.num_local, parallel.data_parallel_size)
        self._folder = private_folder()
        self._wanted: dict[int, RemoteEngine] = {}
        self._ends: dict[int, _Ends] = {}
        self._never_up = set(self._engines_elsewhere)
        self._num_launches = 0
        self._limit = join_seconds(config)
        self._deadline = time.monotonic() + self._limit
        where, engines = self.address.removeprefix("tcp://"), engines_named(self._engines_elsewhere)
        logger.info("Listening on %s for the machines with %s.", where, engines)
        self.start()

    def decode(self, payload: bytes) -> Join | Bye | EngineUp | EngineRefused | EngineGone:
        return decode_report(payload)

    def engine(self, index: int) -> RemoteEngine:
        """Start the engine with this number on its machine, now or when that has joined."""
        self._num_launches += 1
        remote = RemoteEngine(self, index, self._num_launches, str(self._folder.path))
        self.mail.put(partial(self._want, remote))
        return remote

    def forget(self, remote: RemoteEngine) -> None:
        """Nobody uses this start of an engine any more."""
        self.mail.put(partial(self._forget, remote))

    def close(self, why: str = "") -> None:
        super().close(why)
        self._folder.remove()

    def failed(self, why: str) -> None:
        for remote in list(self._wanted.values()):
            self._lose_engine(remote, why)

    def closed(self) -> None:
        for engine in list(self._ends):
            self._close_ends(engine)

    def passed(self, peer: bytes, first: bytes, rest: list[bytes]) -> None:
        """Pass on to the front end, unread, what an engine has sent. Only its own machine counts: another may still send what was meant for
        an earlier head at this address."""
        engine, launch = read_launch(first)
        ends = self._ends.get(engine)
        if ends is not None and ends.engine.launch == launch and self.peer_of(engine) == peer:
            ends.outputs.send_multipart(rest)

    def pass_on(self, source: zmq.Socket) -> None:
        """Pass on to its node, unread, what the front end sends to an engine."""
        ends = next((each for each in self._ends.values() if each.inputs is source), None)
        if ends is None:
            return  # closed in this turn
        engine = ends.engine.engine
        first = launch_frame(engine, ends.engine.launch)
        for frames in drain(source):
            if (peer := self.peer_of(engine)) is not None and not self.send_frames(peer, [first, *frames]):
                return  # the machine is lost, and `source` closed

    def heard(self, peer: bytes, report: EngineUp | EngineRefused | EngineGone) -> None:
        remote = self._wanted.get(report.engine)
        if remote is None or remote.launch != report.launch:
            return
        with contextlib.suppress(InvalidStateError):  # nobody waits any longer
            if isinstance(report, EngineUp):
                self._open_ends(remote)
                self._never_up.discard(remote.engine)
                remote.up.set_result(report.ready)
            elif isinstance(report, EngineRefused):
                remote.up.set_exception(
                    EngineStartError(f"engine {remote.engine} on {self.nodes[peer].name}: {report.message}")
                )
            else:
                self._close_ends(remote.engine)
                remote.gone.set_result(report.exit_code)

    def problem(self, join: Join) -> str:
        for engine in join.numbers:
            if engine not in self._engines_elsewhere:
                here = f"0 to {self._parallel.num_local - 1}" if self._parallel.num_local else "none"
                return f"engine {engine} is not for another machine: of {self._parallel.data_parallel_size} engines the head has {here}"
            if (owner := self.peer_of(engine)) is not None:
                return f"engine {engine} is taken by node {self.nodes[owner].name}; see --data-parallel-start-rank"
        return ""

    def joined(self, peer: bytes, join: Join) -> None:
        logger.info("Node %s has joined, with %s.", join.name, engines_named(join.numbers))
        for engine in join.numbers:
            if engine in self._wanted:
                self._start_engine(peer, self._wanted[engine])

    def _start_engine(self, peer: bytes, remote: RemoteEngine) -> None:
        self.send(peer, StartEngine(remote.engine, remote.launch))

    def _want(self, remote: RemoteEngine) -> None:
        self._wanted[remote.engine] = remote
        if (peer := self.peer_of(remote.engine)) is not None:
            self._start_engine(peer, remote)

    def _forget(self, remote: RemoteEngine) -> None:
        if self._wanted.get(remote.engine) is remote:
            del self._wanted[remote.engine]
            self._close_ends(remote.engine)

    def _open_ends(self, remote: RemoteEngine) -> None:
        """Stand in for the engine: DEALER for what it gets, PUSH for what it sends, as its own sockets are."""
        ends = _Ends(self.context.socket(zmq.DEALER), self.context.socket(zmq.PUSH), remote)
        ends.inputs.setsockopt(zmq.IDENTITY, remote.identity)
        for socket, address in ((ends.inputs, remote.input_address), (ends.outputs, remote.output_address)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)  # the front end waits for the first of them
            socket.connect(address)
        ends.inputs.send(b"")  # a ROUTER can only address peers from which it has heard
        self.poller.register(ends.inputs, zmq.POLLIN)
        self._ends[remote.engine] = ends

    def _close_ends(self, engine: int) -> None:
        if (ends := self._ends.pop(engine, None)) is not None:
            self.poller.unregister(ends.inputs)
            ends.inputs.close()
            ends.outputs.close()

    def lost(self, join: Join, why: str) -> None:
        """Once their clients know, its engines are wanted again; those that were still loading already are."""
        logger.error("Node %s is lost: %s. Its engines come back when it joins again.", join.name, why)
        for engine in join.numbers:
            if engine in self._ends:
                self._lose_engine(self._wanted[engine], f"node {join.name} is lost: {why}.")

    def _lose_engine(self, remote: RemoteEngine, why: str) -> None:
        self._close_ends(remote.engine)
        remote.node_lost = why
        with contextlib.suppress(InvalidStateError):
            remote.up.set_exception(EngineStartError(why))
        with contextlib.suppress(InvalidStateError):
            remote.gone.set_result(-1)

    def pinged(self) -> None:
        """When the server starts, machines that do not come are an error; one that was there and is lost may take its time."""
        missing = [engine for engine in sorted(self._never_up) if self.peer_of(engine) is None]
        if not missing or time.monotonic() < self._deadline:
            return
        parallel = self._parallel
        error = EngineStartError(
            f"no machine came for {engines_named(missing)} within {self._limit:.0f} s; start one with --headless "
            f"--data-parallel-size {parallel.data_parallel_size} --data-parallel-start-rank {missing[0]} --data-parallel-address "
            f"{parallel.data_parallel_address} --data-parallel-rpc-port {self.address.rpartition(':')[2]}"
        )
        for engine in missing:
            if (remote := self._wanted.get(engine)) is not None:
                with contextlib.suppress(InvalidStateError):
                    remote.up.set_exception(error)


class RemoteEngineClient(DPAsyncMPClient):
    """The client of an engine on another machine."""

    def __init__(self, config: VllmConfig, engine_index: int, hub: NodeHub) -> None:
        super().__init__(config, engine_index)
        self._hub = hub

    def start_process(self) -> None:
        self._process = self._remote = self._hub.engine(self.engine_index)

    async def start(self) -> EngineReady:
        if self._process is None:
            self.start_process()
        await asyncio.wrap_future(self._remote.up)  # no thread waits: the machine may never come back
        return await super().start()

    def _report_death(self, loop: asyncio.AbstractEventLoop, message: str) -> None:
        if not self._remote.node_lost:
            return super()._report_death(loop, message)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is shutting down
            loop.call_soon_threadsafe(self._die, NodeLostError(self._remote.node_lost))


class HeadClient(DPLBAsyncMPClient):
    """DPLBAsyncMPClient with engines on other machines."""

    def __init__(self, config: VllmConfig) -> None:
        """Raises ConfigError for what only a machine without an API server can have."""
        parallel = config.data_parallel_config
        if parallel.first_index:
            raise ConfigError(
                f"data_parallel_start_rank {parallel.first_index} is for a machine without an API server (--headless), or with "
                "--data-parallel-hybrid-lb; the head begins with 0"
            )
        self._hub: NodeHub | None = None
        super().__init__(config, self._make_one)

    def _make_one(self, config: VllmConfig, index: int) -> AsyncEngineCoreClient:
        if index < config.data_parallel_config.num_local:
            return DPAsyncMPClient(config, index)
        assert self._hub is not None
        return RemoteEngineClient(config, index, self._hub)

    def start_process(self) -> None:
        self._hub = NodeHub(self._config)
        super().start_process()

    def shutdown(self) -> None:
        super().shutdown()
        if self._hub is not None:
            self._hub.close()
