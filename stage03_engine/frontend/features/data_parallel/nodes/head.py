"""The head's side of headless nodes: engines on other machines, among those of `DPLBAsyncMPClient`.

`NodeHub` listens for the other machines. Each of them opens one connection, over which everything goes: who joins, which engine is to start or
has ended, and what the engines' own sockets carry. To `AsyncMPClient` an engine there looks like one here: `RemoteEngine` has the interface of
EngineProcess, and the hub stands in for it at the front end's sockets.
(vLLM: the engines of a node connect to the head themselves, through several ports; a node that is lost ends the head.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial

import zmq

from stage03_engine.args.processes import private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError, StagesError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.frontend.engine_process import HELLO_SECONDS, EngineProcess
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.frontend.features.data_parallel.engine import DPAsyncMPClient
from stage03_engine.frontend.features.data_parallel.nodes.facts import differences, facts_of
from stage03_engine.frontend.features.data_parallel.nodes.mailbox import Mailbox
from stage03_engine.frontend.features.data_parallel.nodes.messages import (
    CONTROL,
    Bye,
    EngineGone,
    EngineRefused,
    EngineUp,
    Join,
    Order,
    Ping,
    Refusal,
    StartEngine,
    Welcome,
    decode_report,
    encode,
    engines_named,
    launch_frame,
    read_launch,
)
from stage03_engine.frontend.features.data_parallel.restart import NodeLostError
from stage03_engine.messages import MALFORMED, EngineReady
from stage03_engine.nodes.secure_sockets import WARN_SECONDS, Listener, read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)
PING_SECONDS = 0.5
"""How often the head sends a ping, which fails once the connection is gone."""
LAST_WORDS_MS = 1000


def join_seconds(config: VllmConfig) -> float:
    """How long the machines of a service wait for each other when they start."""
    return getattr(getattr(config, "parallel_config", None), "distributed_timeout_seconds", None) or HELLO_SECONDS


def drain(socket: zmq.Socket) -> Iterator[list[bytes]]:
    """All messages that are there."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield socket.recv_multipart(zmq.NOBLOCK)


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
class _Node:
    """A machine that has joined."""

    name: str
    engines: list[int]


@dataclass
class _Ends:
    """The hub's ends of the sockets between the front end and one engine."""

    inputs: zmq.Socket
    outputs: zmq.Socket
    engine: RemoteEngine = field(repr=False)


class NodeHub:
    """The thread that talks to the other machines. Other threads leave their wishes in its mailbox."""

    def __init__(self, config: VllmConfig) -> None:
        """Raises StagesError if it cannot listen."""
        parallel = config.data_parallel_config
        self._parallel, self._facts = parallel, facts_of(config)
        self._engines_elsewhere = range(parallel.num_local, parallel.data_parallel_size)
        self._context = zmq.Context()
        secret = read_secret(config.node_config)
        try:
            self._listener = Listener(self._context, zmq.ROUTER, f"tcp://{parallel.head_address}", secret)
        except StagesError as error:
            self._context.term()
            raise ConfigError(f"{error} (--data-parallel-address, --data-parallel-rpc-port)") from None
        self._socket = self._listener.socket
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a node that is gone is an error
        self._folder = private_folder()
        self._nodes: dict[bytes, _Node] = {}  # by the routing id of their connection
        self._wanted: dict[int, RemoteEngine] = {}
        self._ends: dict[int, _Ends] = {}
        self._never_up = set(self._engines_elsewhere)
        self._num_launches = 0
        self._limit = join_seconds(config)
        self._deadline = time.monotonic() + self._limit
        self._next_ping = self._next_warning = 0.0
        self._is_ending = False
        self._poller = zmq.Poller()
        self._mail: Mailbox[Callable[[], None]] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="node-hub", daemon=True)
        self._announce(secret is not None)
        self._thread.start()

    def _announce(self, is_protected: bool) -> None:
        address = self._listener.address.removeprefix("tcp://")
        logger.info("Listening on %s for the machines with %s.", address, engines_named(self._engines_elsewhere))
        if not is_protected:
            logger.warning(
                "%s listens unprotected: anyone who reaches it can use the engines and read every message.", address
            )
        if trace.on:
            trace.emit("node.listening", address=address, encrypted=is_protected)

    def engine(self, index: int) -> RemoteEngine:
        """Start the engine with this number on its machine, now or when that has joined."""
        self._num_launches += 1
        remote = RemoteEngine(self, index, self._num_launches, str(self._folder.path))
        self._mail.put(partial(self._want, remote))
        return remote

    def forget(self, remote: RemoteEngine) -> None:
        """Nobody uses this start of an engine any more."""
        self._mail.put(partial(self._forget, remote))

    def close(self) -> None:
        """Tell the nodes to end, and end the thread. May be called twice."""
        self._mail.put(self._end)
        self._thread.join()
        self._folder.remove()

    def _run(self) -> None:
        for source in (self._socket, self._mail.fileno(), self._listener.monitor):
            self._poller.register(source, zmq.POLLIN)
        try:
            while not self._is_ending:
                self._turn()
        except Exception as error:  # a bug of ours must reach the waiting clients, not leave them hanging
            logger.exception("the hub of the nodes failed")
            for remote in list(self._wanted.values()):
                self._lose(remote, f"the hub of the nodes failed: {error!r}")
        finally:
            for engine in list(self._ends):
                self._close_ends(engine)
            self._listener.close(LAST_WORDS_MS)
            self._mail.close()
            self._context.term()

    def _turn(self) -> None:
        """Handle what has come; wait for it until the next ping."""
        for source, _ in self._poller.poll(int(PING_SECONDS * 1000)):
            if source is self._socket:
                self._hear()
            elif source is self._listener.monitor:
                self._refused_connections()
            elif source == self._mail.fileno():
                for letter in self._mail.take():
                    letter()
            else:
                self._pass_on(source)
        if time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + PING_SECONDS
            for peer in list(self._nodes):
                self._send(peer, Ping())
            self._check_deadline()

    def _hear(self) -> None:
        """What nodes say."""
        for peer, first, *rest in drain(self._socket):
            try:
                if first == CONTROL:
                    self._obey(peer, decode_report(rest[0]))
                else:
                    self._outputs(peer, read_launch(first), rest)
            except (IndexError, *MALFORMED) as error:
                logger.warning("ignored a malformed message of a node, which may have another version: %s", error)

    def _outputs(self, peer: bytes, launch: tuple[int, int], frames: list[bytes]) -> None:
        """Pass on to the front end, unread, what an engine has sent. Only its own machine counts: another may still send what was meant for
        an earlier head at this address."""
        ends = self._ends.get(launch[0])
        if ends is not None and ends.engine.launch == launch[1] and self._peer_of(launch[0]) == peer:
            ends.outputs.send_multipart(frames)

    def _pass_on(self, source: zmq.Socket) -> None:
        """Pass on to its node, unread, what the front end sends to an engine."""
        ends = next((each for each in self._ends.values() if each.inputs is source), None)
        if ends is None:
            return  # closed in this turn
        engine = ends.engine.engine
        first = launch_frame(engine, ends.engine.launch)
        for frames in drain(source):
            if (peer := self._peer_of(engine)) is not None:
                self._send_frames(peer, [first, *frames])

    def _send(self, peer: bytes, order: Order) -> bool:
        return self._send_frames(peer, [CONTROL, encode(order)])

    def _send_frames(self, peer: bytes, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart([peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose_node(peer, "its connection is gone")
            return False
        return True

    def _peer_of(self, engine: int) -> bytes | None:
        return next((peer for peer, node in self._nodes.items() if engine in node.engines), None)

    def _obey(self, peer: bytes, report: Join | EngineUp | EngineRefused | EngineGone | Bye) -> None:
        if isinstance(report, Join):
            return self._join(peer, report)
        if peer not in self._nodes:
            return
        if isinstance(report, Bye):
            return self._lose_node(peer, "it was told to end")
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
                    EngineStartError(f"engine {remote.engine} on {self._nodes[peer].name}: {report.message}")
                )
            else:
                self._close_ends(remote.engine)
                remote.gone.set_result(report.exit_code)

    def _join(self, peer: bytes, join: Join) -> None:
        """A machine offers its engines. It is refused if something is wrong, in the same words on both sides."""
        for other in {owner for engine in join.engines if (owner := self._peer_of(engine)) is not None}:
            self._send(other, Ping())  # is it still there?
        if problem := self._problem(join):
            logger.error("Node %s cannot join: %s", join.name, problem)
            self._send(peer, Refusal(problem))
            return
        self._nodes[peer] = _Node(join.name, join.engines)
        welcome = Welcome(trace.run_id)
        if trace.on:
            offset = time.monotonic_ns() - join.monotonic_ns
            welcome.cause = trace.emit(
                "node.joined", cause=join.cause, node=join.name, engines=join.engines, clock_offset_ns=offset
            )
        logger.info("Node %s has joined, with %s.", join.name, engines_named(join.engines))
        if self._send(peer, welcome):
            for engine in join.engines:
                if engine in self._wanted:
                    self._start(peer, self._wanted[engine])

    def _problem(self, join: Join) -> str:
        if wrong := differences(self._facts, join.facts):
            return f"{wrong}; both sides must have the same"
        for engine in join.engines:
            if engine not in self._engines_elsewhere:
                here = f"0 to {self._parallel.num_local - 1}" if self._parallel.num_local else "none"
                return f"engine {engine} is not for another machine: of {self._parallel.data_parallel_size} engines the head has {here}"
            if (owner := self._peer_of(engine)) is not None:
                return f"engine {engine} is taken by node {self._nodes[owner].name}; see --data-parallel-start-rank"
        return ""

    def _start(self, peer: bytes, remote: RemoteEngine) -> None:
        self._send(peer, StartEngine(remote.engine, remote.launch))

    def _want(self, remote: RemoteEngine) -> None:
        self._wanted[remote.engine] = remote
        if (peer := self._peer_of(remote.engine)) is not None:
            self._start(peer, remote)

    def _forget(self, remote: RemoteEngine) -> None:
        if self._wanted.get(remote.engine) is remote:
            del self._wanted[remote.engine]
            self._close_ends(remote.engine)

    def _open_ends(self, remote: RemoteEngine) -> None:
        """Stand in for the engine: DEALER for what it gets, PUSH for what it sends, as its own sockets are."""
        ends = _Ends(self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH), remote)
        ends.inputs.setsockopt(zmq.IDENTITY, remote.identity)
        for socket, address in ((ends.inputs, remote.input_address), (ends.outputs, remote.output_address)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)  # the front end waits for the first of them
            socket.connect(address)
        ends.inputs.send(b"")  # a ROUTER can only address peers from which it has heard
        self._poller.register(ends.inputs, zmq.POLLIN)
        self._ends[remote.engine] = ends

    def _close_ends(self, engine: int) -> None:
        if (ends := self._ends.pop(engine, None)) is not None:
            self._poller.unregister(ends.inputs)
            ends.inputs.close()
            ends.outputs.close()

    def _lose_node(self, peer: bytes, why: str) -> None:
        """A machine is gone. Once their clients know, its engines are wanted again; those that were still loading already are."""
        node = self._nodes.pop(peer, None)
        if node is None:
            return
        logger.error("Node %s is lost: %s. Its engines come back when it joins again.", node.name, why)
        if trace.on:
            trace.emit("node.lost", node=node.name, engines=node.engines, message=why)
        for engine in node.engines:
            if engine in self._ends:
                self._lose(self._wanted[engine], f"node {node.name} is lost: {why}.")

    def _lose(self, remote: RemoteEngine, why: str) -> None:
        self._close_ends(remote.engine)
        remote.node_lost = why
        with contextlib.suppress(InvalidStateError):
            remote.up.set_exception(EngineStartError(why))
        with contextlib.suppress(InvalidStateError):
            remote.gone.set_result(-1)

    def _check_deadline(self) -> None:
        """When the server starts, machines that do not come are an error; one that was there and is lost may take its time."""
        missing = [engine for engine in sorted(self._never_up) if self._peer_of(engine) is None]
        if not missing or time.monotonic() < self._deadline:
            return
        parallel = self._parallel
        error = EngineStartError(
            f"no machine came for {engines_named(missing)} within {self._limit:.0f} s; start one with --headless "
            f"--data-parallel-size {parallel.data_parallel_size} --data-parallel-start-rank {missing[0]} --data-parallel-address "
            f"{parallel.data_parallel_address} --data-parallel-rpc-port {self._listener.address.rpartition(':')[2]}"
        )
        for engine in missing:
            if (remote := self._wanted.get(engine)) is not None:
                with contextlib.suppress(InvalidStateError):
                    remote.up.set_exception(error)

    def _refused_connections(self) -> None:
        if self._listener.refused() and time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARN_SECONDS
            logger.warning(
                "Refused a connection at %s: a node without the secret of this service, or with another one.",
                self._listener.address.removeprefix("tcp://"),
            )

    def _end(self) -> None:
        for peer in list(self._nodes):
            self._send(peer, Bye())
        self._is_ending = True


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
