"""A machine without an API server: its engines serve the head (`serve --headless`).

The head says when which engine is to start. The engines are those of any other server, with sockets in a private folder; this process has the
front end's ends of them and passes everything on, unread. When it ends, its engines do.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, EngineStartError, StagesError
from stage03_engine.frontend.core_client import bind_sockets
from stage03_engine.frontend.engine_process import EngineProcess
from stage03_engine.frontend.features.data_parallel.devices import own_devices
from stage03_engine.frontend.features.data_parallel.engine import numbered, share_of
from stage03_engine.frontend.features.data_parallel.manifest import DataParallelConfig
from stage03_engine.frontend.features.data_parallel.nodes.messages import (
    EQUAL,
    EngineGone,
    EngineRefused,
    EngineUp,
    StartEngine,
    decode_order,
    engines_named,
    launch_frame,
    read_launch,
)
from stage03_engine.nodes.hub import drain
from stage03_engine.nodes.member import Member
from stage03_engine.nodes.messages import Bye, Join, Ping, Refusal, Welcome
from stage03_engine.nodes.sameness import facts_of

logger = logging.getLogger(__name__)


def run_engines(config: VllmConfig) -> int:
    """Run this machine's engines until the head or a signal ends it; returns the exit code. Raises StagesError if it cannot join, and
    when the head is lost."""
    _check(config.data_parallel_config)
    return HeadlessNode(config).work()


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


class HeadlessNode(Member[StartEngine]):
    """The engines of this machine.

    The threads that start engines and wait for processes leave letters for the one that has the sockets.
    """

    FLAGS = "--data-parallel-address, --data-parallel-rpc-port"

    def __init__(self, config: VllmConfig) -> None:
        self._parallel = parallel = config.data_parallel_config
        engines = list(range(parallel.first_index, parallel.first_index + parallel.num_local))
        super().__init__(config, f"tcp://{parallel.head_address}", engines, engines_named(engines).capitalize())
        self._launches: dict[int, _Launch] = {}
        self._starting = threading.Lock()  # which GPUs an engine sees is a variable of this process

    def decode(self, payload: bytes) -> Welcome | Refusal | Ping | Bye | StartEngine:
        return decode_order(payload)

    def join(self, name: str) -> Join:
        return Join(name, self.numbers, facts_of(self.config, EQUAL), time.monotonic_ns())

    def passed(self, first: bytes, rest: list[bytes]) -> None:
        """What the front end sends to an engine."""
        engine, launch = read_launch(first)
        found = self._launches.get(engine)
        if found is not None and found.launch == launch and found.inputs is not None and found.process is not None:
            found.inputs.send_multipart([found.process.identity, *rest])

    def pass_on(self, source: zmq.Socket) -> None:
        """Pass on what an engine sends to the front end. On the input socket it only sends a sign that it is there."""
        for launch in self._launches.values():
            if source is launch.outputs:
                for frames in drain(source):
                    self.connection.send(launch.first_frame, *frames)
            elif source is launch.inputs:
                for _ in drain(source):
                    pass

    def obey(self, order: StartEngine) -> None:
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
                share = share_of(self.config, self._parallel.data_parallel_size, later=before is not None)
                process = launch.spawn(share, launch.engine - self._parallel.first_index)
            self.mail.put(partial(self._bound, launch, *bind_sockets(self.context, process)))
            ready = process.shake_hands()
        except (StagesError, OSError, zmq.ZMQError) as error:  # ZMQError: this node ends
            launch.end()
            refused = EngineRefused(launch.engine, launch.launch, str(error))
            return self.mail.put(partial(self.report, refused))
        self.mail.put(partial(self.report, EngineUp(launch.engine, launch.launch, ready)))
        process.on_exit(lambda code: self.mail.put(partial(self._gone, launch, code)))

    def _bound(self, launch: _Launch, inputs: zmq.Socket, outputs: zmq.Socket) -> None:
        launch.inputs, launch.outputs = inputs, outputs
        if self._launches.get(launch.engine) is not launch:
            return self._unbind(launch)
        for socket in (inputs, outputs):
            self.poller.register(socket, zmq.POLLIN)

    def _unbind(self, launch: _Launch) -> None:
        for socket in (launch.inputs, launch.outputs):
            if socket is not None:
                if socket in self.poller:
                    self.poller.unregister(socket)
                socket.close()
        launch.inputs = launch.outputs = None

    def _gone(self, launch: _Launch, exit_code: int) -> None:
        """The process of an engine has ended: the head gets its last words, and says whether it is to start again."""
        if self._launches.get(launch.engine) is not launch:
            return
        logger.error("Engine %d has ended (exit code %d).", launch.engine, exit_code)
        if launch.outputs is not None:
            self.pass_on(launch.outputs)
        self.report(EngineGone(launch.engine, launch.launch, exit_code))
        self._unbind(launch)
        launch.end()

    def reap(self) -> None:
        """End and reap every engine."""
        launches = list(self._launches.values())
        if launches:
            with ThreadPoolExecutor(len(launches)) as threads:  # they end side by side
                list(threads.map(_Launch.end, launches))
        for launch in launches:
            self._unbind(launch)
