"""Misconception: each worker has the whole bias, so each adds it; the sum then holds it several times."""

from __future__ import annotations

from torch import Tensor, nn

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import all_reduce
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403
from stage03_engine.core.models.layers import Linear

REJECTED = "The bias is added once."


class RowParallelLinear(nn.Module):
    def __init__(self, inner: Linear, own: Ranks) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.inner(x))
