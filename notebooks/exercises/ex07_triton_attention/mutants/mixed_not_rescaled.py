"""Misconception: only the total has to follow the new largest score; the values were weighted when they came."""

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
REJECTED = "What was summed so far is brought to the new largest score"


@triton.jit
def _softmax_step(scores, value, largest, total, mixed):
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    total = total * tl.exp2(largest - shift) + tl.sum(weights, 1)
    mixed = mixed + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
    return new_largest, total, mixed
