"""Misconception: -1e9 is as good as -inf, and saves the trouble with NaN. A row that sees nothing then weighs all keys alike."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part as reference, finish, merge_parts

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = "expected  largest [[-inf]]\n  got       [[-1000000000.0]]"


def attend_part(scores: Tensor, values: Tensor) -> SoftmaxPart:
    return reference(scores.clamp(min=-1e9), values)
