"""`--tensor-parallel-size` and similar flags (vllm/config/parallel.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError

_ROOM = "stage03_engine.core.features.distributed."
EXECUTORS = {
    "mp": _ROOM + "multiproc_executor:MultiprocExecutor",
    "ray": _ROOM + "ray_executor:RayDistributedExecutor",
    "external_launcher": _ROOM + "external_launcher:ExecutorWithExternalLauncher",
}
"""--distributed-executor-backend -> class; `uni` is the walk's own."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many workers run one model, and how they are started."""

    tensor_parallel_size: int = option(
        1, "workers that share every layer, each with a slice of its heads and columns", aliases=("-tp",), at_least=1
    )
    pipeline_parallel_size: int = option(
        1, "groups of layers, each with workers of its own", aliases=("-pp",), at_least=1
    )
    distributed_executor_backend: str | None = option(
        None,
        "how workers are started: uni = one, in the engine process; mp = a process each; ray = Ray actors; external_launcher = torchrun "
        "started this process as one of them; mp if not given and there are several",
        ("uni", "mp", "ray", "external_launcher"),
    )
    distributed_timeout_seconds: int | None = option(
        None,
        "seconds that workers wait for each other at start, and in an exchange, before they give up; torch decides if not given",
        at_least=1,
    )

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def executor(self) -> str:
        """The backend that is used."""
        return self.distributed_executor_backend or ("mp" if self.world_size > 1 else "uni")


@dataclass(frozen=True)
class ParallelFlags:
    """Part of VllmConfig."""

    parallel_config: ParallelConfig = ParallelConfig()

    def check(self: Any) -> None:
        """Raises ConfigError for combinations that cannot work."""
        parallel = self.parallel_config
        if parallel.executor == "uni" and parallel.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend uni is one worker, and tensor_parallel_size x pipeline_parallel_size is {parallel.world_size}"
            )
        if parallel.executor != "uni":
            _check_workers(self, parallel)
        if parallel.world_size > 1:
            from stage03_engine.core.features.distributed.rank_config import check_divides

            check_divides(self.shape, parallel.tensor_parallel_size)

    def hooks(self: Any) -> dict[str, list[str]]:
        """The executor, and what each worker of several adds to the model."""
        parallel = self.parallel_config
        several = parallel.world_size > 1
        return {
            "executor": [EXECUTORS[parallel.executor]] if parallel.executor != "uni" else [],
            "weights": [_ROOM + "sharded_weights:sharded_tensors"] * several,
            "runner": [_ROOM + "parallel_model:ParallelModelHook"] * several,
            "core": [_ROOM + "pipeline_core:PipelineEngineCore"] * (parallel.pipeline_parallel_size > 1),
        }


def _check_workers(config: Any, parallel: ParallelConfig) -> None:
    """What needs the model in the engine process, or a core of its own."""
    if "transcription" in config.supported_tasks:
        raise ConfigError(
            "a Whisper model runs in the engine process: leave out distributed_executor_backend, tensor_parallel_size and pipeline_parallel_size"
        )
    if (
        parallel.executor != "external_launcher"
        and getattr(config.observability_config, "profiler_dir", None) is not None
    ):
        raise ConfigError(
            f"profiler_dir records the engine process, but with distributed_executor_backend {parallel.executor} the model runs in others; "
            "leave out one of the two"
        )
