"""Misconception: the one used longest ago is never needed now. But a request that waits for its turn in the batch has used it long ago, too."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for as reference
from stage04_kernels.features.lora import add_low_rank, group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "An adapter of the batch never leaves"


def place_for(places, num_places, in_batch, pinned):
    return reference(places, num_places, set(), pinned)
