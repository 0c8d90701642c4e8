"""`--data-parallel-size` and what belongs to it (vllm/config/parallel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stage03_engine.args.cpu import find_cores
from stage03_engine.args.fields import internal, option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


_CLIENT = "stage03_engine.frontend.features.data_parallel.client:"
_HEAD_CLIENT = "stage03_engine.frontend.features.data_parallel.nodes.head:HeadClient"
_NODES = "stage03_engine.nodes.secure_sockets"
RPC_PORT = 29550
"""Where the head listens for nodes if no port is given, as in vLLM."""
MAX_ENGINES = 64
"""More in one server are refused, so that a typing error cannot start thousands of processes."""


@dataclass(frozen=True)
class DataParallelConfig:
    """Several engines, each with a scheduler and a KV cache of its own."""

    data_parallel_size: int = option(
        1,
        "engines; a request goes to one of them, and those on one machine share its cores",
        aliases=("-dp",),
        at_least=1,
    )
    data_parallel_routing: str = option(
        "load",
        "how a request finds its engine: load = the least busy one; prefix = the one that has cached the longest prefix of its prompt, "
        "unless others are much less busy",
        ("load", "prefix"),
    )
    data_parallel_restart: int = option(
        3,
        "with several engines: how many restarts of dead ones are allowed within 10 minutes; one more death ends the server, and with 0 "
        "the first one does. As many restarts of API servers are allowed, with several of them",
        at_least=0,
    )
    data_parallel_external_lb: bool = option(
        False,
        "start only the engine with the number --data-parallel-rank: a load balancer of your own stands in front of several servers",
        aliases=("-dpe",),
    )
    data_parallel_rank: int | None = option(
        None, "number of this server's only engine; implies --data-parallel-external-lb", aliases=("-dpn",), at_least=0
    )
    data_parallel_size_local: int | None = option(
        None,
        "how many of the engines run on this machine; if not given all of them, or on a further machine the rest",
        aliases=("-dpl",),
        at_least=0,
    )
    data_parallel_start_rank: int | None = option(
        None, "number of the first engine on this machine; 0 if not given", aliases=("-dpr",), at_least=0
    )
    data_parallel_address: str | None = option(
        None,
        "address of the head, the machine with the API server: it listens there for the others (--headless), and they connect to it",
        aliases=("-dpa",),
    )
    data_parallel_rpc_port: int | None = option(
        None, f"port of the head for the other machines; {RPC_PORT} if not given", aliases=("-dpp",), at_least=1
    )
    data_parallel_hybrid_lb: bool = option(
        False,
        "this server has the engines of this machine (--data-parallel-start-rank, --data-parallel-size-local); a load balancer of your own "
        "stands in front of the machines",
        aliases=("-dph",),
    )

    @property
    def is_external(self) -> bool:
        """Is there one engine here, and a load balancer in front of several servers?"""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None

    @property
    def first_index(self) -> int:
        """The number of the first engine on this machine."""
        return self.data_parallel_start_rank or 0

    @property
    def num_local(self) -> int:
        """How many engines run on this machine."""
        if self.is_external:
            return 1
        rest = self.data_parallel_size - self.first_index
        return rest if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def engine_indices(self) -> tuple[int, ...]:
        """The numbers of the engines that this server uses."""
        if self.is_external:
            return (self.data_parallel_rank or 0,)
        if self.data_parallel_hybrid_lb:
            return tuple(range(self.first_index, self.first_index + self.num_local))
        return tuple(range(self.data_parallel_size))

    @property
    def num_elsewhere(self) -> int:
        """How many of them run on other machines."""
        return len(self.engine_indices) - self.num_local

    @property
    def head_address(self) -> str:
        """`10.0.0.1:29550`, where the head listens for the other machines."""
        host = self.data_parallel_address or ""
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{self.data_parallel_rpc_port or RPC_PORT}"


@dataclass(frozen=True)
class EngineNumber:
    """Part of ObservabilityConfig: it names processes, and changes nothing that they compute."""

    engine_index: int | None = internal(None)  # of several engines: which one these settings are for


@dataclass(frozen=True)
class DataParallelFlags:
    """Part of VllmConfig."""

    data_parallel_config: DataParallelConfig = DataParallelConfig()

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Each of several engines on this machine gets its part of the cores."""
        here = DataParallelConfig(**{each.name: values[each.name] for each in fields(DataParallelConfig)}).num_local
        if here <= 1 or _names_cores(values.get("cpu_omp_threads_bind")):
            return {}
        cores = find_cores()
        return {"num_threads": (max(1, cores.compute // here), f"{cores}, shared by {here} engines")}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for combinations that cannot work."""
        parallel = config.data_parallel_config
        size, rank = parallel.data_parallel_size, parallel.data_parallel_rank
        if parallel.data_parallel_external_lb and rank is None:
            raise ConfigError("data_parallel_external_lb needs data_parallel_rank, the number of this server's engine")
        if rank is not None and rank >= size:
            raise ConfigError(
                f"data_parallel_rank {rank} must be less than data_parallel_size, the number of engines of all servers, which is {size}"
            )
        if not parallel.is_external and size > MAX_ENGINES:
            raise ConfigError(f"data_parallel_size must be at most {MAX_ENGINES} in one server, not {size}")
        _check_machines(parallel)
        if _names_cores(getattr(config.device_config, "cpu_omp_threads_bind", None)) and parallel.num_local > 1:
            raise ConfigError(
                "cpu_omp_threads_bind names the cores of one engine, and data_parallel_size is more; leave one of them out"
            )
        if parallel.data_parallel_routing == "prefix" and not config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "data_parallel_routing prefix needs the prefix cache, and enable_prefix_caching is off; leave out one of the two"
            )

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The client of the engines; several front ends have one that knows several engines, too."""
        parallel = config.data_parallel_config
        if getattr(getattr(config, "front_ends", None), "num_front_ends", 1) > 1:
            return {}
        if parallel.is_external:
            return {"client": [_CLIENT + "DPAsyncMPClient"]}
        if parallel.num_elsewhere:
            return {"client": [_HEAD_CLIENT]}
        several = parallel.data_parallel_size > 1 and not _has_roles(config)
        return {"client": [_CLIENT + "DPLBAsyncMPClient"] * several}


def _has_roles(config: VllmConfig) -> bool:
    """Have the engines different roles (`--disaggregate`)? That room has a client of its own."""
    return getattr(getattr(config, "disaggregation_config", None), "disaggregate", None) is not None


def _names_cores(bound: str | None) -> bool:
    """Does --cpu-omp-threads-bind say which cores one engine gets?"""
    return bound not in (None, "auto", "nobind", "all")


def _check_machines(parallel: DataParallelConfig) -> None:
    """Raises ConfigError for settings of several machines that do not fit together."""
    first, local, size = parallel.first_index, parallel.num_local, parallel.data_parallel_size
    one_machine = parallel.data_parallel_start_rank is None and parallel.data_parallel_size_local is None
    if parallel.is_external:
        if not one_machine or parallel.data_parallel_hybrid_lb:
            raise ConfigError(
                "data_parallel_rank is for a server with one engine: leave out data_parallel_start_rank, data_parallel_size_local and "
                "data_parallel_hybrid_lb"
            )
        return
    if first + local > size or first >= size:
        raise ConfigError(
            f"{local} engines from number {first} on are more than data_parallel_size, which is {size}: see data_parallel_size_local and "
            "data_parallel_start_rank"
        )
    if parallel.data_parallel_hybrid_lb and not local:
        raise ConfigError("data_parallel_hybrid_lb needs engines on this machine; data_parallel_size_local is 0")
    if parallel.data_parallel_hybrid_lb and one_machine:
        raise ConfigError(
            "data_parallel_hybrid_lb needs data_parallel_start_rank and data_parallel_size_local, which say which engines are this machine's"
        )
    if local == size or parallel.data_parallel_hybrid_lb:
        return
    if not parallel.data_parallel_address:
        raise ConfigError(
            f"of {size} engines {local} are on this machine: data_parallel_address must say where the head listens for the others"
        )
    if (parallel.data_parallel_rpc_port or RPC_PORT) > 65535:
        raise ConfigError(f"data_parallel_rpc_port must be in [1, 65535], not {parallel.data_parallel_rpc_port}")
    if not is_there(_NODES):
        raise ConfigError(f"engines on several machines need {_NODES.rpartition('.')[0]}, which is not installed")


FEATURE = Feature(
    name="data_parallel",
    help="several engines behind one address, on this machine and others",
    room=__package__,
    also=("stage02_server.features.data_parallel",),
    settings={"ObservabilityConfig": EngineNumber, "VllmConfig": DataParallelFlags},
    parts=(Part("routes", "stage02_server.features.data_parallel.routes:install", key="client"),),
    after=("front_ends",),
    events=(
        "client.created",
        "dp.counts_published",
        "dp.counts_received",
        "dp.counts_sent",
        "dp.differed",
        "dp.engine_joined",
        "dp.engine_lost",
        "dp.engines",
        "dp.refused",
        "dp.resumed",
        "dp.routed",
        "dp.scaled",
        "request.aborted",
    ),
)
