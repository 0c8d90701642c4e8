"""Misconception: exp2(-inf) is 0, so nothing can go wrong. But -inf - -inf is NaN."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import (
    _load_blocks,
    _load_keys_and_values,
    _paged_attention,
    _scores,
)

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "expected  total 0.0\n  got       nan"


@triton.jit
def _softmax_step(scores, value, largest, total, mixed):
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    rescale = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores - new_largest[:, None])
    total = total * rescale + tl.sum(weights, 1)
    mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
    return new_largest, total, mixed
