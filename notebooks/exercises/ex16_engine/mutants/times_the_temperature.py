"""Misconception: a high temperature makes large differences; but it makes small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from judging import load
from torch import Tensor

REJECTED = "drawn with the probability"
reference = load(Path(__file__).parents[1] / "reference.py")


class Engine(reference.Engine):
    def forward(self, batch: list[Any]) -> Tensor:
        temperatures = torch.tensor([[each.request.temperature or 1.0] for each in batch])
        logits: Tensor = super().forward(batch)
        return logits * temperatures**2
