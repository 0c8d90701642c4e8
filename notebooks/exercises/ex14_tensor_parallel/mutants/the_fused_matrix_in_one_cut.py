"""Misconception: a matrix is a matrix; but the first half of queries, keys and values is not half of each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import Split, cut as reference
from stage03_engine.model_shape import ModelShape

REJECTED = "each part is cut"


def cut(name: str, stored: Any, split: Split, whole: ModelShape, own: Ranks) -> Tensor:
    slice_ = reference(name, stored, split, whole, own)
    if split.parts == 1:
        return slice_
    size = slice_.shape[split.dim]
    begin, end = own.tp_rank * size, (own.tp_rank + 1) * size
    return stored[begin:end] if split.dim == 0 else stored[:, begin:end]
