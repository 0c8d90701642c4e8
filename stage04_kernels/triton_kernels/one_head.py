"""A first attention kernel: one request, one head, every key in one block after the other. It explains `paged_attention.py`, which adds
batches, heads, windows and splits to these lines, and nothing uses it but notebook 11 and the tests.

One program takes ROWS query tokens. It walks through the keys in blocks of KEYS, and never holds more scores than [ROWS, KEYS]: the softmax is
kept as a running maximum, a running sum and a running mix of values (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _one_head(
    query_ptr, key_ptr, value_ptr, out_ptr,  # [num_tokens, DIM], and for keys and values [num_blocks * KEYS, DIM]
    block_table_ptr,  # [blocks of the request]: where positions 0 .. KEYS - 1 lie, then the next KEYS, ...
    num_tokens, scale,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # the position of each query token
    dim, offset = tl.arange(0, DIM), tl.arange(0, KEYS)
    query = tl.load(query_ptr + row[:, None] * DIM + dim[None, :], mask=row[:, None] < num_tokens, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.minimum(num_tokens, (tl.program_id(0) + 1) * ROWS)
    for start in range(0, last, KEYS):  # causal: no key after the last row
        block = tl.load(block_table_ptr + start // KEYS)
        at = (block * KEYS + offset)[:, None] * DIM + dim[None, :]
        real = (start + offset < num_tokens)[:, None]
        key = tl.load(key_ptr + at, mask=real, other=0.0)
        value = tl.load(value_ptr + at, mask=real, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, KEYS]
        scores = tl.where(start + offset[None, :] <= row[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp(largest - new_largest)  # what was summed so far is too large by this much
        weights = tl.exp(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
    result = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * DIM + dim[None, :], result, mask=row[:, None] < num_tokens)


def attend_one_head(query: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, rows: int = 16) -> Tensor:
    """Causal attention of a whole prompt: query [num_tokens, dim] -> the same shape.

    keys, values  [num_blocks, block_size, dim]: the cache of one head, written already
    block_table   [blocks of the request] int32
    rows          query tokens per program

    dim, block_size and rows are powers of two, and on a GPU at least 16; query, keys and values are contiguous.
    """
    num_tokens, dim = query.shape
    out = torch.empty_like(query)
    _one_head[(triton.cdiv(num_tokens, rows),)](
        query, keys, values, out, block_table, num_tokens, dim**-0.5, DIM=dim, ROWS=rows, KEYS=keys.shape[1],
    )  # fmt: skip
    return out
