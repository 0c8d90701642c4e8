"""Misconception: all that is not below the k-th largest logit stays; with equal ones that is more than k."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.logits_processors import *  # noqa: F403
from stage04_kernels.sampler import *  # noqa: F403

REJECTED = "top-k keeps exactly top_k tokens"


def apply_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)[:, None]
    kth = logits.sort(dim=-1, descending=True).values.gather(1, k - 1)
    return logits.masked_fill(logits < kth, -torch.inf)
