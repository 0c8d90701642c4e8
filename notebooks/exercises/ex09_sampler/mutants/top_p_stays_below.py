"""Misconception: the kept tokens may not exceed p together; so the one that reaches it is lost."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "whose probabilities reach top_p"


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    out = (ordered.softmax(dim=-1).cumsum(dim=-1) > top_p[:, None]) & (top_p < 1)[:, None]
    out[:, 0] = False  # at least one stays
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(out, -torch.inf))
