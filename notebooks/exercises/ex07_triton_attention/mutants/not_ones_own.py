"""Misconception: a token sees what came before it. It sees itself too."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import (
    _load_blocks,
    _load_keys_and_values,
    _paged_attention,
    _softmax_step,
)

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "expected  [0.5, -inf, -inf, -inf]\n  got       [-inf, -inf, -inf, -inf]"


@triton.jit
def _scores(query, key, key_position, first_seen, last_seen, scale, HAS_WINDOW: tl.constexpr):
    scores = tl.dot(query, tl.trans(key), input_precision="ieee").to(tl.float32) * scale
    visible = key_position[None, :] < last_seen[:, None]
    if HAS_WINDOW:
        visible = visible & (key_position[None, :] >= first_seen[:, None])
    return tl.where(visible, scores, float("-inf"))
