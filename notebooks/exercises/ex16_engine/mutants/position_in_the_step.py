"""Misconception: a token's position is its place in what is read now; but with a cache the newest token is read alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from judging import load
from torch import Tensor

REJECTED = "the likeliest one after the prompt and the answer so far"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def forward(self, batch: list[Any]) -> Tensor:
        places, start = self.weights["wpe.weight"], min(each.num_computed for each in batch)
        self.weights["wpe.weight"] = places.roll(start, 0)
        logits: Tensor = super().forward(batch)
        self.weights["wpe.weight"] = places
        return logits
