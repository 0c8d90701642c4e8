"""Misconception: a seed seeds a generator; but all rows draw from that one, so each depends on who stands above it."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "on nothing else in the batch"


def sample_random(logits: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(seeds[0] + positions[0])
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)
