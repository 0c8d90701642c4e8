"""Misconception: a slot holds one head, and the next head lies one slot further. A slot holds all heads, one behind the other."""

from __future__ import annotations

import triton
import triton.language as tl

from stage04_kernels.triton_kernels.paged_attention import _load_blocks, _paged_attention, _scores, _softmax_step

__all__ = ["_load_blocks", "_load_keys_and_values", "_paged_attention", "_scores", "_softmax_step"]
REJECTED = "expected  positions [0] of a\n  got       read: slot 1, which is nobody's"


@triton.jit
def _load_keys_and_values(
    key_ptr, value_ptr, block, key_position, real_key, dim, real_dim, kv_head, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    slot = block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE
    at = (slot[:, None] + kv_head) * HEAD_DIM + dim[None, :]
    real = real_key[:, None] & real_dim[None, :]
    return tl.load(key_ptr + at, mask=real, other=0.0).to(DTYPE), tl.load(value_ptr + at, mask=real, other=0.0).to(
        DTYPE
    )
