"""Misconception: counting from the largest score only makes numbers nicer; exp of the score itself does as well, and is put right at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part as reference, finish, merge_parts

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = 'nothing overflows."\n  keys      scores [[100.0]]'


def attend_part(scores: Tensor, values: Tensor) -> SoftmaxPart:
    largest, weights = reference(scores, values).largest, torch.exp(scores)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    return SoftmaxPart(largest, weights.sum(-1, keepdim=True) / torch.exp(shift), weights @ values / torch.exp(shift))
