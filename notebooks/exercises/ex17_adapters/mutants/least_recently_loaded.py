"""Misconception: whoever came first has been there longest, and goes first: the lowest number."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for as reference
from stage04_kernels.features.lora import add_low_rank, group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "used longest ago"


def place_for(places, num_places, in_batch, pinned):
    return reference(dict(sorted(places.items())), num_places, in_batch, pinned)
