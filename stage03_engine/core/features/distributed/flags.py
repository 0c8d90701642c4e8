"""`--tensor-parallel-size` and similar flags (vllm/config/parallel.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError


@dataclass(frozen=True)
class ParallelConfig:
    """How many of each part there are. Only one of each is supported; the fields exist so that the error is clear."""

    tensor_parallel_size: int = option(1, "GPUs that share one model (only 1 is built)", aliases=("-tp",), at_least=1)
    pipeline_parallel_size: int = option(
        1, "groups of layers on different GPUs (only 1 is built)", aliases=("-pp",), at_least=1
    )
    data_parallel_size: int = option(1, "engine copies (only 1 is built)", aliases=("-dp",), at_least=1)


@dataclass(frozen=True)
class ParallelFlags:
    """Part of VllmConfig."""

    parallel_config: ParallelConfig = ParallelConfig()

    def check(self) -> None:
        """Raises ConfigError for more than one of anything."""
        for field in fields(self.parallel_config):
            size = getattr(self.parallel_config, field.name)
            if size > 1:
                raise ConfigError(f"{field.name} = {size} is not built yet; only 1 is")
