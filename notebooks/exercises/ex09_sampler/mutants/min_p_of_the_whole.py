"""Misconception: min-p is a probability, not a share of the largest one."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "less likely than min_p times the likeliest"


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    return logits.masked_fill(logits.softmax(dim=-1) < min_p[:, None], -torch.inf)
