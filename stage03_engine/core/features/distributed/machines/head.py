"""One engine on several machines (`--nnodes 2`), seen from machine 0, where the engine is.

    machine 0                                             machine 1: serve MODEL --headless --nnodes 2 --node-rank 1
    EngineCore -> MultiNodeExecutor                       WorkerNode -> starts and watches its workers
                    ├─ Nodes          ROUTER  <──────────── DEALER   join, who ended, bye
                    └─ ROUTER ─┬─> DEALER  Worker_TP0
                               └──────────────────────────> DEALER   Worker_TP1

Each worker connects to the executor itself, so a step costs as many messages as on one machine. In vLLM each machine has an executor,
and they share the decisions through torch.distributed (v1/executor/multiproc_executor.py, node_rank_within_dp).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.machines.addresses import (
    environment_with_secret,
    head_address,
    interface_towards,
    nodes_port,
    tcp,
)
from stage03_engine.core.features.distributed.machines.links import WorkerRouter
from stage03_engine.core.features.distributed.machines.messages import (
    JoinEngine,
    StartWorkers,
    WorkerEnded,
    decode_report,
)
from stage03_engine.core.features.distributed.multiproc_executor import MultiprocExecutor, WorkerProcesses
from stage03_engine.core.features.distributed.worker_messages import WorkerInit
from stage03_engine.errors import ConfigError
from stage03_engine.nodes.hub import PING_SECONDS, Hub
from stage03_engine.nodes.messages import Bye, Join
from stage03_engine.nodes.sameness import facts_of
from stage03_engine.nodes.secure_sockets import read_secret
from stagetrace import trace

logger = logging.getLogger(__name__)


class Nodes(Hub[WorkerEnded]):
    """The other machines of one engine. In its thread it calls `welcome` when one joins, `ended` when a worker ends, and `fail` when a machine is gone."""

    FLAGS = "--master-addr, --master-port"

    def __init__(
        self, config: VllmConfig, welcome: Callable[[JoinEngine], StartWorkers], ended: Callable[[str, int], None],
        fail: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Raises ConfigError if it cannot listen."""
        self._parallel = parallel = config.parallel_config
        self._welcome, self._ended, self._fail = welcome, ended, fail
        super().__init__(config, tcp(head_address(parallel), nodes_port(parallel)), facts_of(config))
        logger.info(
            "Listening on %s for %d other machines: stages serve MODEL --headless --nnodes %d --node-rank N --master-addr %s --master-port %d",
            self.address, parallel.nnodes - 1, parallel.nnodes, parallel.master_addr, parallel.master_port,
        )  # fmt: skip

    def decode(self, payload: bytes) -> JoinEngine | Bye | WorkerEnded:
        return decode_report(payload)

    def problem(self, join: Join) -> str:
        assert isinstance(join, JoinEngine)
        if join.nnodes != self._parallel.nnodes:
            return f"nnodes is {self._parallel.nnodes} on the head and {join.nnodes} on the node"
        [node] = join.numbers
        if not 0 < node < join.nnodes:
            return f"node_rank {node} is not that of another machine"
        if (owner := self.peer_of(node)) is not None:
            return f"node_rank {node} is taken by node {self.nodes[owner].name}"
        return ""

    def joined(self, peer: bytes, join: Join) -> None:
        assert isinstance(join, JoinEngine)
        start = self._welcome(join)
        if self.send(peer, start):
            logger.info("Node %s has joined, for %s.", join.name, ", ".join(start.workers.values()))

    def heard(self, peer: bytes, report: WorkerEnded) -> None:
        self._ended(report.lane, report.exit_code)

    def lost(self, join: Join, why: str) -> None:
        self._fail(f"machine {join.numbers[0]} is lost: {why}")

    def failed(self, why: str) -> None:
        self._fail(why)


class WorkersOfMachines(WorkerProcesses):
    """The workers of all machines. Those of this machine are child processes; `Nodes` hears of the others."""

    LAST_WORDS_SECONDS = 0.5 + 3 * PING_SECONDS  # a machine is known to be gone when it has got no ping

    def _open(self) -> None:
        parallel = self.config.parallel_config
        if parallel.node_rank != 0:
            raise ConfigError(
                f"node_rank {parallel.node_rank} has no engine of its own: start it with `stages serve MODEL --headless`"
            )
        self._hosts: dict[int, JoinEngine] = {}
        self._head, secret = head_address(parallel), read_secret(self.config.node_config)
        self._check_port(parallel.master_port)
        self._links = router = WorkerRouter(tcp(self._head, "*"), secret, len(self.lanes))
        self._address = router.address
        self._nodes = Nodes(self.config, self._welcome, self._ended, lambda why: self._fail(why, killed=True))
        self._nodes.start()
        logger.warning(
            "torch.distributed listens unprotected at %s until all workers have met; use a network that nobody else is on.",
            tcp(self._head, parallel.master_port).removeprefix("tcp://"),
        )
        if secret is None:
            logger.warning("%s listens unprotected: whoever reaches it can use the engine.", self._address)
        environment = self._environment(interface_towards(self._head))
        for rank in range(parallel.local_world_size):
            self._spawned.start(rank, self.lanes[rank], environment, self._address)

    def _check_port(self, port: int) -> None:
        """Raises ConfigError for a port in use: torch would report it in many lines, after this machine's workers have loaded their weights."""
        try:
            family = socket.AF_INET6 if ":" in self._head else socket.AF_INET
            socket.create_server((self._head, port), family=family).close()
        except OSError as error:
            raise ConfigError(f"port {port} (--master-port) cannot be used: {error.strerror}") from None

    def _environment(self, interface: str | None) -> dict[str, str]:
        return environment_with_secret(super()._environment(interface), self.config.node_config)

    def _welcome(self, join: JoinEngine) -> StartWorkers:
        """In the thread of `Nodes`."""
        [node], count = join.numbers, self.config.parallel_config.local_world_size
        self._hosts[node] = join
        return StartWorkers({rank: self.lanes[rank] for rank in range(node * count, (node + 1) * count)}, self._address)

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
