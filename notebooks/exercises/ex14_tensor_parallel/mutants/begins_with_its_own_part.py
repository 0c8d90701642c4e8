"""Misconception: the order of a sum does not matter; in floating point it does, and then two workers draw different tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403

REJECTED = "every worker has the same bits"


def all_reduce_in_place(x: Tensor, group: dist.ProcessGroup | None) -> None:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    for distance in range(1, len(parts)):
        x += parts[(dist.get_rank(group) + distance) % len(parts)]
