"""Misconception: ascending or descending makes no difference; but turned round, the higher index of equals comes first."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "takes the lower index first"


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    ordered, order = (each.flip(-1) for each in logits.sort(dim=-1, stable=True))
    probs = ordered.softmax(dim=-1)
    out = (probs.cumsum(dim=-1) - probs >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(out, -torch.inf))
