"""Misconception: (B A) x and B (A x) are equal, so the order of the products is a matter of taste."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for
from stage04_kernels.features.lora import group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "is never made"


def add_low_rank(y, x, a, b, groups):
    for place, rows in groups.by_place:
        own = (x if rows is None else x[rows]).to(a.dtype)
        more = (own @ (b[place] @ a[place]).T).to(y.dtype)
        y = y.add_(more) if rows is None else y.index_add_(0, rows, more)
    return y
