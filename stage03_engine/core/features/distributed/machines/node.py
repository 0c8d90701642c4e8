"""`stages serve MODEL --headless --nnodes 2 --node-rank 1 --master-addr HEAD`: a machine that lends its processor to an engine elsewhere.

It asks the head which workers to start, watches them, and reports those that end. The workers talk to the head themselves. This process ends
when the engine ends, or when the head is silent for 5 seconds. (vLLM: run_headless in vllm/entrypoints/cli/serve.py, with an executor
on each machine.) Imports no torch.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import zmq

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.machines.addresses import (
    environment_with_secret,
    head_address,
    interface_towards,
    nodes_port,
    tcp,
)
from stage03_engine.core.features.distributed.machines.messages import (
    NodeHello,
    NodeInit,
    NodeLeft,
    NodeRefused,
    NodeStop,
    Ping,
    WorkerEnded,
    decode_from_head,
    encode,
)
from stage03_engine.core.features.distributed.machines.sameness import must_agree
from stage03_engine.core.features.distributed.spawned_workers import SpawnedWorkers, worker_environment
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.messages import MALFORMED
from stage03_engine.nodes.secure_sockets import Connection, Lost, Refused, read_secret

logger = logging.getLogger(__name__)
POLL_MS = 100
ANSWER_SECONDS = 600.0  # for the head to start; it may be started later than this machine
END_SECONDS = 3.0  # for workers that were asked to end
FAREWELL_MS = 1000


class Stopped(Exception):
    """SIGINT or SIGTERM."""


def run_node(config: VllmConfig) -> int:
    """Lend this machine until the engine ends; returns the exit code. Raises StagesError with the reason if it cannot go on."""
    if config.parallel_config.node_rank == 0:
        raise ConfigError("node_rank 0 is the machine with the engine and the API server: start it without headless")
    node = Node(config)
    try:
        with _signals_stop():
            node.run()
    except Stopped:
        node.leave()
    finally:
        node.close()
    logger.info("Stopped.")
    return 0


@contextmanager
def _signals_stop() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Node:
    """One of the machines that have no engine."""

    def __init__(self, config: VllmConfig) -> None:
        """Raises ConfigError for a missing model or secret."""
        self._config = config
        self._parallel = parallel = config.parallel_config
        self._head = head_address(parallel)
        self._address = tcp(self._head, nodes_port(parallel))
        self._agreed, secret = must_agree(config), read_secret(config.node_config)
        if secret is None:
            logger.warning(
                "The connection to %s is unprotected: anyone on its path can read and change the messages.",
                self._address,
            )
        self._ended: queue.SimpleQueue[WorkerEnded] = queue.SimpleQueue()
        self._workers = SpawnedWorkers(lambda lane, code: self._ended.put(WorkerEnded(lane, code)))
        self._patience = 0.0  # for workers whose engine ends normally
        self._context = zmq.Context()
        self._connection = Connection(self._context, zmq.DEALER, self._address, secret)

    def run(self) -> None:
        """Returns when the engine ends normally. Raises StagesError for any other end."""
        self._say_hello()
        poller = zmq.Poller()
        poller.register(self._connection.socket, zmq.POLLIN)
        poller.register(self._connection.monitor, zmq.POLLIN)
        asked = self._parallel.distributed_timeout_seconds or ANSWER_SECONDS
        deadline: float | None = time.monotonic() + asked
        while True:
            ready = dict(poller.poll(POLL_MS))
            if self._connection.socket in ready:  # first: a head that ends says why before it is gone
                message = self._hear()
                if isinstance(message, NodeStop):
                    return self._stop(message.why)
                if isinstance(message, NodeRefused):
                    raise ConfigError(f"the head at {self._address} refuses this machine: {message.why}")
                if isinstance(message, NodeInit):
                    self._start(message)
                    deadline = None
            elif self._connection.monitor in ready:
                self._news()
            elif deadline is not None and time.monotonic() > deadline:
                raise StagesError(f"the head at {self._address} did not answer within {asked:.0f} s; is it running?")
            while not self._ended.empty():
                self._connection.send(encode(self._ended.get()))

    def _hear(self) -> NodeInit | NodeRefused | Ping | NodeStop:
        try:
            return decode_from_head(self._connection.socket.recv_multipart()[0])
        except MALFORMED as error:
            raise StagesError(f"the head at {self._address} may have another version: {error}") from None

    def _say_hello(self) -> None:
        parallel, model = self._parallel, self._config.model_config
        hello = NodeHello(
            parallel.node_rank, parallel.nnodes, self._agreed, model.model_path, model.tokenizer_path,
            self._config.device_config.num_threads,
        )  # fmt: skip
        self._connection.send(encode(hello))
        logger.info("Machine %d: asking the head at %s for work", parallel.node_rank, self._address)

    def _news(self) -> None:
        try:
            self._connection.news()
        except Refused:
            raise StagesError(
                f"the head at {self._address} has another secret, or only one of the two machines has one: give both the same "
                "--node-secret-file or STAGES_NODE_SECRET"
            ) from None
        except Lost:
            raise StagesError(
                f"the head at {self._address} is gone: its process was killed, or the network is cut"
            ) from None

    def _start(self, init: NodeInit) -> None:
        device, interface = self._config.device_config, interface_towards(self._head)
        threads = max(1, (device.num_threads or 1) // len(init.workers))
        environment = worker_environment(threads, device.attention_backend, interface)
        environment = environment_with_secret(environment, self._config.node_config)
        for rank, lane in init.workers.items():
            self._workers.start(rank, lane, environment, init.address)
        logger.info("Running %s for %s", ", ".join(init.workers.values()), self._address)

    def _stop(self, why: str) -> None:
        if why:
            raise StagesError(f"the engine at {self._address} ended: {why}")
        self._patience = END_SECONDS

    def leave(self) -> None:
        """Tell the head, whose engine then ends."""
        self._connection.send(encode(NodeLeft()))
        self._connection.socket.disable_monitor()
        self._connection.socket.close(linger=FAREWELL_MS)

    def close(self) -> None:
        """End the workers."""
        self._workers.reap_all(self._patience)
        self._connection.close()
        self._context.destroy(linger=0)
