"""Misconception: a split has at least one key. With more programs than keys it has none."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.backends.online_softmax import SoftmaxPart, finish, merge_parts

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = "amax(): Expected reduction dim"


def attend_part(scores: Tensor, values: Tensor) -> SoftmaxPart:
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))
    return SoftmaxPart(largest, weights.sum(dim=-1, keepdim=True), weights @ values)
