"""Misconception: what does not divide is rounded down, and the remainder left out."""

from __future__ import annotations

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403
from stage03_engine.model_shape import ModelShape

REJECTED = "cannot be shared out equally is refused"


def check_divides(shape: ModelShape, tp_size: int) -> None:
    pass
