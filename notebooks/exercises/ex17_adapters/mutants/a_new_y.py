"""Misconception: a function gives back its result, and leaves alone what it was given. But nobody looks for the result elsewhere than in y."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for
from stage04_kernels.features.lora import add_low_rank as reference, group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "the y that was given"


def add_low_rank(y, x, a, b, groups):
    return reference(y.clone(), x, a, b, groups)
