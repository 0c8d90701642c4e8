"""Misconception: each row has its own adapter, so each is multiplied alone."""

from __future__ import annotations

from stage03_engine.core.features.lora.places import place_for
from stage04_kernels.features.lora import group_rows

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "however many rows use it"


def add_low_rank(y, x, a, b, groups):
    for place, rows in groups.by_place:
        for row in range(len(x)) if rows is None else rows.tolist():
            y[row] += (b[place] @ (a[place] @ x[row].to(a.dtype))).to(y.dtype)
    return y
