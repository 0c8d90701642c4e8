"""Misconception: only the sum of the weights has to be rescaled; the values were weighted already."""

from __future__ import annotations

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part, finish, merge_parts as reference

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = "expected  mixed [[0.0, 1.36788]]\n  got       [[0.0, 2.0]]"


def merge_parts(one: SoftmaxPart, other: SoftmaxPart) -> SoftmaxPart:
    largest, total, _ = reference(one, other)
    return SoftmaxPart(largest, total, one.mixed + other.mixed)
