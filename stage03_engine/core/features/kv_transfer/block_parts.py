"""What each worker has of a block: with `-tp` some of its heads, with `-pp` some of its layers. No torch.

All functions give the same from the engine's configuration and from each worker's (vLLM: TpKVTopology).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.kv_cache_size import kv_block_bytes


def num_workers(config: VllmConfig) -> int:
    """Each has its part of every block."""
    return getattr(getattr(config, "parallel_config", None), "world_size", 1)


def of_engine(config: VllmConfig) -> VllmConfig:
    """With the shape of the whole model, of which a worker's configuration has a part."""
    whole: Any = getattr(config.shape, "whole", config.shape)
    return replace(config, model_config=replace(config.model_config, shape=whole))


def part_bytes(config: VllmConfig) -> list[int]:
    """Bytes of each worker's part of a block, by rank. A model with fewer KV heads than slices has each head on several workers: their parts are alike."""
    if num_workers(config) == 1:
        return [kv_block_bytes(config)]
    from stage03_engine.core.features.distributed.rank_config import rank_config
    from stage03_engine.core.features.distributed.ranks import Ranks

    whole, parallel = of_engine(config), config.parallel_config
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return [kv_block_bytes(rank_config(whole, Ranks(rank, *sizes))) for rank in range(num_workers(config))]


def part_of(config: VllmConfig, rank: int) -> slice:
    """Where a worker's part is in the bytes of a whole block: the parts lie one behind the other, by rank."""
    sizes = part_bytes(config)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])
