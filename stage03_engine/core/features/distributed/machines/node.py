"""`stages serve MODEL --headless --nnodes 2 --node-rank 1 --master-addr HEAD`: a machine that lends its processor to an engine elsewhere.

It asks the head which workers to start, watches them, and reports those that end. The workers talk to the head themselves.
(vLLM has an executor on each machine.) Imports no torch.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.machines.addresses import (
    environment_with_secret,
    head_address,
    interface_towards,
    nodes_port,
    tcp,
)
from stage03_engine.core.features.distributed.machines.messages import (
    JoinEngine,
    StartWorkers,
    WorkerEnded,
    decode_order,
)
from stage03_engine.core.features.distributed.spawned_workers import SpawnedWorkers, worker_environment
from stage03_engine.errors import ConfigError
from stage03_engine.nodes.hub import join_seconds
from stage03_engine.nodes.member import Member
from stage03_engine.nodes.messages import Bye, Ping, Refusal, Welcome
from stage03_engine.nodes.sameness import facts_of

logger = logging.getLogger(__name__)
END_SECONDS = 3.0  # for workers that were asked to end


def run_node(config: VllmConfig) -> int:
    """Lend this machine until the engine, or a signal, ends it; returns the exit code. Raises StagesError with the reason if it cannot go on."""
    if config.parallel_config.node_rank == 0:
        raise ConfigError("node_rank 0 is the machine with the engine and the API server: start it without headless")
    return WorkerNode(config).work()


class WorkerNode(Member[StartWorkers]):
    """One of the machines that have no engine."""

    FLAGS = "--master-addr, --master-port"

    def __init__(self, config: VllmConfig) -> None:
        """Raises ConfigError for a missing model or secret."""
        self._parallel = parallel = config.parallel_config
        self._facts, self._address = facts_of(config), head_address(parallel, join_seconds(config))
        what, address = f"Machine {parallel.node_rank}", tcp(self._address, nodes_port(parallel))
        super().__init__(config, address, [parallel.node_rank], what)
        self._workers = SpawnedWorkers(lambda lane, code: self.mail.put(partial(self.report, WorkerEnded(lane, code))))

    def decode(self, payload: bytes) -> Welcome | Refusal | Ping | Bye | StartWorkers:
        return decode_order(payload)

    def join(self, name: str) -> JoinEngine:
        model, threads = self.config.model_config, self.config.device_config.num_threads
        return JoinEngine(
            name, self.numbers, self._facts, time.monotonic_ns(), nnodes=self._parallel.nnodes,
            model_path=model.model_path, tokenizer_path=model.tokenizer_path, num_threads=threads,
        )  # fmt: skip

    def obey(self, order: StartWorkers) -> None:
        device, interface = self.config.device_config, interface_towards(self._address)
        threads = max(1, (device.num_threads or 1) // len(order.workers))
        environment = worker_environment(threads, device.attention_backend, interface)
        environment = environment_with_secret(environment, self.config.node_config)
        for rank, lane in order.workers.items():
            self._workers.start(rank, lane, environment, order.address)
        logger.info("Running %s for %s.", ", ".join(order.workers.values()), self.head)

    def reap(self) -> None:
        """End the workers. An engine that ends normally has asked its own to."""
        self._workers.reap_all(END_SECONDS if self.has_head_ended else 0.0)
