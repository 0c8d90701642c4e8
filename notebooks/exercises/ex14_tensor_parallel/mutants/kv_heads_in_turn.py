"""Misconception: workers take the KV heads in turn; but the query heads of neighbours read the same one."""

from __future__ import annotations

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import own_range as reference
from stage03_engine.model_shape import ModelShape

REJECTED = "along     kv_heads"


def own_range(along: str, whole: ModelShape, own: Ranks) -> tuple[int, int]:
    if along == "kv_heads" and own.tp_size > whole.num_kv_heads:
        head = own.tp_rank % whole.num_kv_heads
        return head * whole.head_dim, (head + 1) * whole.head_dim
    return reference(along, whole, own)
