"""Misconception: the running part is mine, so it may be changed in place. The caller may still need what it handed over."""

from __future__ import annotations

from stage04_kernels.backends.online_softmax import SoftmaxPart, attend_part, finish, merge_parts as reference

__all__ = ["attend_part", "finish", "merge_parts"]
REJECTED = "the first part as it was"


def merge_parts(one: SoftmaxPart, other: SoftmaxPart) -> SoftmaxPart:
    for field, merged in zip(one, reference(one, other)):
        field.copy_(merged)
    return one
