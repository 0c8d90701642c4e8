"""A machine without an API server: its engines serve the head (`serve --headless`; vllm/entrypoints/cli/serve.py, run_headless).

This process connects to the head, which says when which engine is to start. The engines are those of any other server, with sockets in a private
folder; this process has the front end's ends of them and passes everything on, unread. It ends when the head ends or can no longer be
reached, and its engines with it.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import zmq

from stage03_engine.args.log import announce, name_process
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError, StagesError
from stage03_engine.frontend.core_client import bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.devices import own_devices
from stage03_engine.frontend.features.data_parallel.engine import numbered, share_of
from stage03_engine.frontend.features.data_parallel.manifest import DataParallelConfig
from stage03_engine.frontend.features.data_parallel.nodes.facts import facts_of
from stage03_engine.frontend.features.data_parallel.nodes.head import LAST_WORDS_MS, drain, join_seconds
from stage03_engine.frontend.features.data_parallel.nodes.mailbox import Mailbox
from stage03_engine.frontend.features.data_parallel.nodes.messages import (
    CONTROL,
    Bye,
    EngineGone,
    EngineRefused,
    EngineUp,
    Join,
    Refusal,
    Report,
    StartEngine,
    Welcome,
    decode_order,
    encode,
    engines_named,
    launch_frame,
    read_launch,
)
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.secure_sockets import Connection, Lost, NodeSecret, Refused, read_secret
from stage03_engine.tracing import open_trace
from stagetrace import trace

logger = logging.getLogger(__name__)
TURN_MS = 500


def run_engines(config: VllmConfig) -> int:
    """Run this machine's engines until the head or a signal ends it; returns the exit code. Raises StagesError if it cannot join, and
    when the head is lost."""
    parallel = config.data_parallel_config
    _check(parallel)
    name = f"Node_{parallel.first_index}"
    trace.rename(name)
    name_process(name)
    secret = read_secret(config.node_config)
    announce(config)
    node = HeadlessNode(config, secret)
    try:
        with node.signals():
            return node.run()
    finally:
        node.shutdown()


def _check(parallel: DataParallelConfig) -> None:
    """Raises ConfigError for what a machine without an API server cannot have."""
    if parallel.is_external or parallel.data_parallel_hybrid_lb:
        raise ConfigError(
            "headless starts no API server: leave out data_parallel_rank, data_parallel_external_lb and data_parallel_hybrid_lb"
        )
    if parallel.num_local == 0:
        raise ConfigError("headless needs engines to start: data_parallel_size_local is 0")
    if parallel.num_local == parallel.data_parallel_size:
        raise ConfigError(
            "headless is for some engines of a server elsewhere: give data_parallel_start_rank, data_parallel_size_local and "
            "data_parallel_address"
        )


class _Launch:
    """One start of an engine on this machine."""

    def __init__(self, engine: int, launch: int) -> None:
        self.engine, self.launch = engine, launch
        self.first_frame = launch_frame(engine, launch)
        self.process: EngineProcess | None = None
        self.inputs: zmq.Socket | None = None
        self.outputs: zmq.Socket | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def spawn(self, config: VllmConfig, place: int) -> EngineProcess:
        """Start the process. Raises OSError, StagesError if there is no GPU for it, and EngineStartError if it is not wanted any more."""
        with self._lock:
            if self._is_over:
                raise EngineStartError("this start was overtaken by another")
            with own_devices(config, place):
                self.process = EngineProcess(numbered(config, self.engine), self.engine)
            return self.process

    def end(self) -> None:
        """End and reap the process, in any thread. May be called twice."""
        with self._lock:
            self._is_over = True
            if self.process is not None:
                self.process.shutdown()


class HeadlessNode:
    """The engines of this machine, and the connection to the head.

    One thread has the sockets and all state; the threads that start engines and wait for processes, and signals, leave letters for it.
    """

    def __init__(self, config: VllmConfig, secret: NodeSecret | None) -> None:
        self._config = config
        self._parallel = config.data_parallel_config
        self._head = self._parallel.head_address
        self._name = f"{platform.node()} (pid {os.getpid()})"
        self._context = zmq.Context()
        if secret is None:
            logger.warning(
                "The connection to %s is unprotected: anyone on its path can read and change the messages.",
                self._head,
            )
        self._connection = Connection(self._context, zmq.DEALER, f"tcp://{self._head}", secret)
        self._launches: dict[int, _Launch] = {}
        self._starting = threading.Lock()  # which GPUs an engine sees is a variable of this process
        self._engines = list(range(self._parallel.first_index, self._parallel.first_index + self._parallel.num_local))
        self._has_asked = self._has_joined = False
        self._exit_code: int | None = None
        self._mail: Mailbox[Callable[[], None]] = Mailbox()
        self._poller = zmq.Poller()
        for source in (self._connection.socket, self._connection.monitor, self._mail.fileno()):
            self._poller.register(source, zmq.POLLIN)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside the `with` block SIGTERM and SIGINT end this node."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._signalled) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._exit_code is not None else handler)

    def _signalled(self, number: int, frame: object) -> None:
        self._mail.put(partial(self._stop, signal.Signals(number).name))

    def run(self) -> int:
        """Returns the exit code. Raises StagesError if this node cannot join, and when the head is lost."""
        logger.info("%s for the head at %s; connecting.", engines_named(self._engines).capitalize(), self._head)
        deadline = time.monotonic() + join_seconds(self._config)
        while self._exit_code is None:
            self._turn()
            if not self._has_joined and time.monotonic() > deadline:
                raise EngineStartError(
                    f"no head answers at {self._head} (--data-parallel-address, --data-parallel-rpc-port)"
                )
        return self._exit_code

    def _ask_to_join(self) -> None:
        """The first message, sent only once the connection is there, so that the head can compare the clocks."""
        join = Join(self._name, self._engines, facts_of(self._config), time.monotonic_ns())
        if trace.on:
            join.cause = trace.emit("node.join_sent", engines=self._engines, head=self._head)
        self._report(join)
        self._has_asked = True

    def _turn(self) -> None:
        """Handle what has come, from the head first; wait for it for a moment."""
        ready = [source for source, _ in self._poller.poll(TURN_MS)]
        self._obey()
        for source in ready:
            if source == self._mail.fileno():
                for letter in self._mail.take():
                    letter()
            elif source is self._connection.monitor:
                self._news()
            elif source is not self._connection.socket:
                self._pass_on(source)

    def _news(self) -> None:
        """The connection has changed. What the head said before that comes first."""
        self._obey()
        try:
            if self._exit_code is None:
                self._connection.news()
                if self._connection.is_there and not self._has_asked:
                    self._ask_to_join()
        except Refused:
            raise EngineStartError(
                f"the head at {self._head} refuses this node: the secrets differ, or only one side has one (--node-secret-file, "
                "STAGES_NODE_SECRET)"
            ) from None
        except Lost:
            raise EngineStartError(
                f"the head at {self._head} is lost: it has died, or the network to it is cut; this node ends"
            ) from None

    def _obey(self) -> None:
        """Carry out what the head says."""
        for first, *rest in drain(self._connection.socket):
            try:
                if first != CONTROL:
                    self._input(read_launch(first), rest)
                    continue
                order = decode_order(rest[0])
            except (IndexError, *MALFORMED) as error:
                logger.warning("ignored a malformed message of the head, which may have another version: %s", error)
                continue
            if isinstance(order, Welcome):
                self._welcome(order)
            elif isinstance(order, Refusal):
                raise ConfigError(f"the head at {self._head} refuses this node: {order.message}")
            elif isinstance(order, StartEngine):
                self._start(order)
            elif isinstance(order, Bye):
                logger.info("The head ends, and so does this node.")
                self._exit_code = 0

    def _welcome(self, welcome: Welcome) -> None:
        self._has_joined = True
        open_trace(self._config, run_id=welcome.run_id)
        if trace.on:
            trace.emit("node.welcomed", cause=welcome.cause)
            trace.flush()
        logger.info("Joined the head at %s.", self._head)

    def _input(self, launch: tuple[int, int], frames: list[bytes]) -> None:
        """What the front end sends to an engine."""
        found = self._launches.get(launch[0])
        if found is not None and found.launch == launch[1] and found.inputs is not None and found.process is not None:
            found.inputs.send_multipart([found.process.identity, *frames])

    def _pass_on(self, source: zmq.Socket) -> None:
        """Pass on what an engine sends to the front end. On the input socket it only sends a sign that it is there."""
        for launch in self._launches.values():
            if source is launch.outputs:
                for frames in drain(source):
                    self._connection.send(launch.first_frame, *frames)
            elif source is launch.inputs:
                for _ in drain(source):
                    pass

    def _report(self, report: Report) -> None:
        self._connection.send(CONTROL, encode(report))

    def _start(self, order: StartEngine) -> None:
        launch, before = _Launch(order.engine, order.launch), self._launches.get(order.engine)
        if before is not None:
            self._unbind(before)
        self._launches[order.engine] = launch
        threading.Thread(
            target=self._bring_up, args=(launch, before), name=f"start-{order.engine}", daemon=True
        ).start()

    def _bring_up(self, launch: _Launch, before: _Launch | None) -> None:
        """In a thread: start the engine, after the one that had its number has ended, and shake hands with it."""
        try:
            if before is not None:
                before.end()
            with self._starting:
                share = share_of(self._config, self._parallel.data_parallel_size, later=before is not None)
                process = launch.spawn(share, launch.engine - self._parallel.first_index)
            self._mail.put(partial(self._bound, launch, *bind_sockets(self._context, process)))
            ready = process.shake_hands()
        except (StagesError, OSError, zmq.ZMQError) as error:  # ZMQError: this node ends
            launch.end()
            refused = EngineRefused(launch.engine, launch.launch, str(error))
            return self._mail.put(partial(self._report, refused))
        self._mail.put(partial(self._report, EngineUp(launch.engine, launch.launch, ready)))
        process.on_exit(lambda code: self._mail.put(partial(self._gone, launch, code)))

    def _bound(self, launch: _Launch, inputs: zmq.Socket, outputs: zmq.Socket) -> None:
        launch.inputs, launch.outputs = inputs, outputs
        if self._launches.get(launch.engine) is not launch:
            return self._unbind(launch)
        for socket in (inputs, outputs):
            self._poller.register(socket, zmq.POLLIN)

    def _unbind(self, launch: _Launch) -> None:
        for socket in (launch.inputs, launch.outputs):
            if socket is not None:
                if socket in self._poller:
                    self._poller.unregister(socket)
                socket.close()
        launch.inputs = launch.outputs = None

    def _gone(self, launch: _Launch, exit_code: int) -> None:
        """The process of an engine has ended: the head gets its last words, and says whether it is to start again."""
        if self._launches.get(launch.engine) is not launch:
            return
        logger.error("Engine %d has ended (exit code %d).", launch.engine, exit_code)
        if launch.outputs is not None:
            self._pass_on(launch.outputs)
        self._report(EngineGone(launch.engine, launch.launch, exit_code))
        self._unbind(launch)
        launch.end()

    def _stop(self, why: str) -> None:
        logger.info("%s: this node ends.", why)
        self._report(Bye())
        self._exit_code = 0

    def shutdown(self) -> None:
        """End and reap every engine, and close the connection."""
        launches = list(self._launches.values())
        if launches:
            with ThreadPoolExecutor(len(launches)) as threads:  # they end side by side
                list(threads.map(_Launch.end, launches))
        for launch in launches:
            self._unbind(launch)
        self._connection.close(LAST_WORDS_MS)
        self._context.destroy(LAST_WORDS_MS)
        self._mail.close()
