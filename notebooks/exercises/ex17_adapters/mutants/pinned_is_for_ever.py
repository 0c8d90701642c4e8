"""Misconception: what is pinned never leaves. Where all others are in the batch, the newcomer then finds no place at all."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for as reference
from stage04_kernels.features.lora import add_low_rank, group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "no exception"


def place_for(places, num_places, in_batch, pinned):
    return reference(places, num_places, {*in_batch, *pinned}, set())
