"""Misconception: the last worker simply has fewer tokens; but then the slices of the logits cannot be gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stage03_engine.core.features.distributed.parallel_layers import *  # noqa: F403
from stage03_engine.core.features.distributed.parallel_state import *  # noqa: F403
from stage03_engine.core.features.distributed.rank_config import *  # noqa: F403
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.sharded_weights import *  # noqa: F403
from stage03_engine.core.features.distributed.sharded_weights import Split, cut as reference, own_range
from stage03_engine.model_shape import ModelShape

REJECTED = "Rows after the end of the vocabulary are zeros"


def cut(name: str, stored: Any, split: Split, whole: ModelShape, own: Ranks) -> Tensor:
    slice_ = reference(name, stored, split, whole, own)
    left = max(0, whole.vocab_size - own_range("vocabulary", whole, own)[0])
    return slice_[:left] if split.along == "vocabulary" else slice_
