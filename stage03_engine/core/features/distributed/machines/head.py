"""One engine on several machines (`--nnodes 2`), seen from machine 0, where the engine is.

    machine 0                                             machine 1: serve MODEL --headless --nnodes 2 --node-rank 1
    EngineCore -> MultiNodeExecutor                       Node -> starts and watches its workers
                    ├─ Nodes          ROUTER  <──────────── DEALER   hello, who ended, stop
                    └─ ROUTER ─┬─> DEALER  Worker_TP0
                               └──────────────────────────> DEALER   Worker_TP1

Each worker connects to the executor itself, so a step costs as many messages as on one machine. In vLLM each machine has an executor,
and they share the decisions through torch.distributed (v1/executor/multiproc_executor.py, node_rank_within_dp).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq

from stage03_engine.core.features.distributed.machines.addresses import (
    environment_with_secret,
    head_address,
    interface_towards,
    nodes_port,
    tcp,
)
from stage03_engine.core.features.distributed.machines.links import WorkerRouter
from stage03_engine.core.features.distributed.machines.messages import (
    NodeHello,
    NodeInit,
    NodeLeft,
    NodeRefused,
    NodeStop,
    Ping,
    WorkerEnded,
    decode_from_node,
    encode,
)
from stage03_engine.core.features.distributed.machines.sameness import difference, must_agree
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor, WorkerProcesses
from stage03_engine.core.features.distributed.worker_messages import WorkerInit
from stage03_engine.errors import ConfigError
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.secure_sockets import WARN_SECONDS, Listener, NodeSecret, read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)
PING_SECONDS = 0.5
FAREWELL_MS = 1000


class Nodes:
    """The other machines. A thread owns the socket to them. It calls `welcome` when one joins, `ended` when a worker ends, and `lost` when a machine is gone."""

    def __init__(
        self, address: str, secret: NodeSecret | None, welcome: Callable[[NodeHello], NodeInit | NodeRefused],
        ended: Callable[[str, int], None], lost: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._context = zmq.Context()
        try:
            self._listener = Listener(self._context, zmq.ROUTER, address, secret)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._listener.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._welcome, self._ended, self._lost = welcome, ended, lost
        self._there: dict[bytes, int] = {}  # name of the connection -> number of the machine
        self._stopping, self._why = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # a bug of ours must end the engine, not leave it waiting
            logger.exception("the thread that hears the other machines failed")
            self._lost(f"the thread that hears the other machines failed: {error!r}")

    def _listen(self) -> None:
        poller, next_ping, next_warning = zmq.Poller(), 0.0, 0.0
        for each in (self._listener.socket, self._listener.monitor):
            poller.register(each, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(100))
            if self._listener.monitor in ready and self._listener.refused() and time.monotonic() >= next_warning:
                next_warning = time.monotonic() + WARN_SECONDS
                logger.warning("Refused a connection to %s: its secret is another one.", self._listener.address)
            if self._listener.socket in ready:
                self._read(*self._listener.socket.recv_multipart()[:2])
            if time.monotonic() >= next_ping:
                self._ping()
                next_ping = time.monotonic() + PING_SECONDS
        for name in self._there:
            self._send(name, NodeStop(self._why))

    def _read(self, name: bytes, payload: bytes) -> None:
        try:
            message = decode_from_node(payload)
        except MALFORMED as error:
            logger.warning("Ignored a malformed message of another machine: %s", error)
            return
        if isinstance(message, NodeHello):
            answer = self._welcome_once(message)
            if self._send(name, answer) and isinstance(answer, NodeInit):
                self._there[name] = message.node_rank
                logger.info("Machine %d is here, for %s.", message.node_rank, ", ".join(answer.workers.values()))
        elif name in self._there and isinstance(message, WorkerEnded):
            self._ended(message.lane, message.exit_code)
        elif isinstance(message, NodeLeft) and (node := self._there.pop(name, None)) is not None:
            self._lost(f"machine {node} was told to stop")

    def _welcome_once(self, hello: NodeHello) -> NodeInit | NodeRefused:
        if hello.node_rank in self._there.values():
            why = f"another machine has node_rank {hello.node_rank} already"
            logger.warning("Refused a machine: %s.", why)
            return NodeRefused(why)
        return self._welcome(hello)

    def _ping(self) -> None:
        """When a process ends, its system closes its connections; when a machine is gone, ZMQ closes them after some seconds."""
        for name, node in list(self._there.items()):
            if not self._send(name, Ping()):
                del self._there[name]
                self._lost(f"machine {node} is gone: its process was killed, or the network is cut")

    def _send(self, name: bytes, message: msgspec.Struct) -> bool:
        """False if the machine is gone."""
        try:
            self._listener.socket.send_multipart([name, encode(message)])
        except zmq.ZMQError:
            return False
        return True

    def close(self, why: str) -> None:
        """Tell the machines that the engine ends, and why if it should not. May be called twice."""
        if self._stopping.is_set():
            return
        self._why = why
        self._stopping.set()
        self._thread.join()
        self._listener.close(linger_ms=FAREWELL_MS)
        self._context.destroy(linger=0)


class WorkersOfMachines(WorkerProcesses):
    """The workers of all machines. Those of this machine are child processes; `Nodes` hears of the others."""

    def _open(self) -> None:
        parallel = self.config.parallel_config
        if parallel.node_rank != 0:
            raise ConfigError(
                f"node_rank {parallel.node_rank} has no engine of its own: start it with `stages serve MODEL --headless`"
            )
        self._hosts: dict[int, NodeHello] = {}
        self._agreed = must_agree(self.config)
        self._head, secret = head_address(parallel), read_secret(self.config.node_config)
        self._check_port(parallel.master_port)
        self._links = router = WorkerRouter(tcp(self._head, "*"), secret, len(self.lanes))
        self._address = router.address
        meet = tcp(self._head, nodes_port(parallel))
        self._nodes = Nodes(meet, secret, self._welcome, self._ended, lambda why: self._fail(why, killed=True))
        logger.info(
            "Listening on %s for %d other machines: stages serve MODEL --headless --nnodes %d --node-rank N --master-addr %s --master-port %d",
            meet, parallel.nnodes - 1, parallel.nnodes, parallel.master_addr, parallel.master_port,
        )  # fmt: skip
        logger.warning(
            "torch.distributed listens unprotected at port %d of all addresses of this machine; use a network that nobody else is on.",
            parallel.master_port,
        )
        if secret is None:
            logger.warning(
                "%s and %s listen unprotected: whoever reaches them can use the engine.", meet, self._address
            )
        environment = self._environment(interface_towards(self._head))
        for rank in range(parallel.local_world_size):
            self._spawned.start(rank, self.lanes[rank], environment, self._address)

    def _check_port(self, port: int) -> None:
        """Raises ConfigError for a port in use: torch would report it in many lines, after this machine's workers have loaded their weights."""
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise ConfigError(f"port {port} (--master-port) cannot be used: {error.strerror}") from None

    def _environment(self, interface: str | None) -> dict[str, str]:
        return environment_with_secret(super()._environment(interface), self.config.node_config)

    def _welcome(self, hello: NodeHello) -> NodeInit | NodeRefused:
        """In the thread of `Nodes`."""
        parallel, node = self.config.parallel_config, hello.node_rank
        if hello.nnodes != parallel.nnodes:
            why = f"nnodes is {parallel.nnodes} on the head, {hello.nnodes} there"
        elif not 0 < node < parallel.nnodes:
            why = f"node_rank {node} is not that of another machine"
        elif not (why := difference(self._agreed, hello.agreed) or ""):
            self._hosts[node] = hello
            count = parallel.local_world_size
            ranks = range(node * count, (node + 1) * count)
            return NodeInit({rank: self.lanes[rank] for rank in ranks}, self._address)
        logger.warning("Refused machine %d: %s.", node, why)
        return NodeRefused(why)

    def _init_of(self, rank: int) -> WorkerInit:
        parallel = self.config.parallel_config
        node, local_rank = divmod(rank, parallel.local_world_size)
        config, threads = self.config, self.config.device_config.num_threads
        if node > 0:
            host = self._hosts[node]
            own = replace(config.model_config, model_path=host.model_path, tokenizer_path=host.tokenizer_path)
            config, threads = replace(config, model_config=own), host.num_threads
        each = None if threads is None else max(1, threads // parallel.local_world_size)
        return WorkerInit(config, rank, local_rank, each, tcp(self._head, parallel.master_port), trace.run_id)

    def _missing(self, ranks: list[int]) -> str:
        nodes = sorted({rank // self.config.parallel_config.local_world_size for rank in ranks})
        return f"{super()._missing(ranks)} (rank {', '.join(map(str, ranks))}, on machine {', '.join(map(str, nodes))})"

    def _release(self) -> None:
        if hasattr(self, "_nodes"):
            self._nodes.close(self._why or ("" if self._loaded else "it could not start"))
        super()._release()


class MultiNodeExecutor(MultiprocExecutor):
    """A worker process per rank, the same number on each of `--nnodes` machines."""

    processes = WorkersOfMachines
