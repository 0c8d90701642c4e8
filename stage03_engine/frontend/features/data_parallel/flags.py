"""`--data-parallel-size` and what belongs to it (vllm/config/parallel.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stage03_engine.args.cpu import compute_threads, find_cores
from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError

_CLIENT = "stage03_engine.frontend.features.data_parallel.client:"
MAX_ENGINES = 64
"""Most engines of one server: a slip of the finger must not start thousands of processes."""


@dataclass(frozen=True)
class DataParallelConfig:
    """Several engines, each with a scheduler and a KV cache of its own."""

    data_parallel_size: int = option(
        1,
        "engines; a request goes to one of them, and they share the cores of this machine",
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
        "with several engines: how many restarts of dead ones are allowed within 10 minutes; one death more ends the server, and with 0 "
        "the first one does",
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

    @property
    def is_external(self) -> bool:
        """Is there one engine here, and a load balancer in front of several servers?"""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None

    @property
    def engine_indices(self) -> tuple[int, ...]:
        """The numbers of the engines that this server starts."""
        return (self.data_parallel_rank or 0,) if self.is_external else tuple(range(self.data_parallel_size))


@dataclass(frozen=True)
class DataParallelFlags:
    """Part of VllmConfig."""

    data_parallel_config: DataParallelConfig = DataParallelConfig()

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Each of several engines gets its part of the cores."""
        size = values["data_parallel_size"]
        if size <= 1 or values["data_parallel_external_lb"] or values["data_parallel_rank"] is not None:
            return {}
        cores = find_cores()
        return {"num_threads": (max(1, compute_threads(cores) // size), f"{cores}, shared by {size} engines")}

    def check(self: Any) -> None:
        """Raises ConfigError for combinations that cannot work."""
        parallel = self.data_parallel_config
        size, rank = parallel.data_parallel_size, parallel.data_parallel_rank
        if parallel.data_parallel_external_lb and rank is None:
            raise ConfigError("data_parallel_external_lb needs data_parallel_rank, the number of this server's engine")
        if rank is not None and rank >= size:
            raise ConfigError(
                f"data_parallel_rank {rank} must be less than data_parallel_size, the number of engines of all servers, which is {size}"
            )
        if not parallel.is_external and size > MAX_ENGINES:
            raise ConfigError(f"data_parallel_size must be at most {MAX_ENGINES} in one server, not {size}")
        bound = getattr(self.device_config, "cpu_omp_threads_bind", None)
        if bound not in (None, "auto", "nobind", "all") and size > 1 and not parallel.is_external:
            raise ConfigError(
                "cpu_omp_threads_bind names the cores of one engine, and data_parallel_size is more; leave one of them out"
            )
        if parallel.data_parallel_routing == "prefix" and not self.cache_config.enable_prefix_caching:
            raise ConfigError(
                "data_parallel_routing prefix needs the prefix cache, and enable_prefix_caching is off; leave out one of the two"
            )

    def hooks(self: Any) -> dict[str, list[str]]:
        """The client of the engines."""
        parallel = self.data_parallel_config
        if parallel.is_external:
            return {"client": [_CLIENT + "DPAsyncMPClient"]}
        return {"client": [_CLIENT + "DPLBAsyncMPClient"] * (parallel.data_parallel_size > 1)}
