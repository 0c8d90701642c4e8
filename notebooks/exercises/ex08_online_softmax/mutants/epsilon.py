"""Misconception: a small number added to each sum protects the division. It changes every part that is merged with an empty one."""

from __future__ import annotations

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part, finish, merge_parts as reference

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = "as it was: largest [[0.0]], total [[1.0]], mixed [[0.0, 1.0]]\n  got       largest [[0.0]], total [[1.0000009536743164]]"


def merge_parts(one: SoftmaxPart, other: SoftmaxPart) -> SoftmaxPart:
    largest, total, mixed = reference(one, other)
    return SoftmaxPart(largest, total + 1e-6 * (total > 0), mixed)
