"""Low-rank sums of several adapters (Chen et al. 2023, "Punica"; Sheng et al. 2023, "S-LoRA"; vllm/lora/ops/triton_ops, lora_shrink_op and
lora_expand_op). The twin of `add_low_rank` in stage04_kernels/features/lora.py.

Two kernels, because a pair is narrow in the middle. `_shrink` takes 16 rows of one adapter from thousands of inputs to a few numbers each; there
are so few programs that each takes a part of the inputs only. `_expand` adds up the parts, and takes them to thousands of outputs.
Programs that work at the same time may belong to different adapters: a table says which place and which rows each one has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.features.lora import TILE_ROWS, RowGroups
from stage04_kernels.triton_kernels.tiles import INTERPRETED, next_power_of_2

MOST_SPLITS = 8
TILE_NUMBERS = 1 << 16 if INTERPRETED else 1 << 12  # of a matrix, that a program takes at a time


@triton.jit
def _shrink(
    x_ptr,  # [num_rows, IN]
    a_ptr,  # [num_places, RANK, IN]
    hidden_ptr,  # [NUM_SPLITS, num_tiles * ROWS, PADDED_RANK]: what each part of the inputs gives
    tile_place_ptr,  # [num_tiles]
    tile_rows_ptr,  # [num_tiles, ROWS]; -1: none
    IN: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    place = tl.load(tile_place_ptr + tile).to(tl.int64)
    rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ranks = tl.arange(0, PADDED_RANK)
    hidden = tl.zeros((ROWS, PADDED_RANK), dtype=tl.float32)
    for start in range(part * BLOCK_K, IN, NUM_SPLITS * BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        there = at < IN
        x = tl.load(x_ptr + rows[:, None] * IN + at[None, :], mask=(rows >= 0)[:, None] & there[None, :], other=0.0)
        a = tl.load(
            a_ptr + (place * RANK + ranks[:, None]) * IN + at[None, :], mask=(ranks < RANK)[:, None] & there[None, :], other=0.0
        )  # fmt: skip
        if UPCAST:  # multiply in float32: the interpreter's bfloat16 is wrong
            x, a = x.to(tl.float32), a.to(tl.float32)
        hidden += tl.dot(x, tl.trans(a), input_precision="ieee").to(tl.float32)
    row = (part * tl.num_programs(0) + tile) * ROWS + tl.arange(0, ROWS)
    tl.store(hidden_ptr + row[:, None] * PADDED_RANK + ranks[None, :], hidden)


@triton.jit
def _expand(
    y_ptr,  # [num_rows, OUT]; the sums are added to it
    b_ptr,  # [num_places, OUT, RANK]
    hidden_ptr,  # as above
    tile_place_ptr,
    tile_rows_ptr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    place = tl.load(tile_place_ptr + tile).to(tl.int64)
    rows = tl.load(tile_rows_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ranks = tl.arange(0, PADDED_RANK)
    hidden = tl.zeros((ROWS, PADDED_RANK), dtype=tl.float32)
    for part in range(NUM_SPLITS):
        row = (part * tl.num_programs(0) + tile) * ROWS + tl.arange(0, ROWS)
        hidden += tl.load(hidden_ptr + row[:, None] * PADDED_RANK + ranks[None, :])
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = at < OUT
    b = tl.load(
        b_ptr + (place * OUT + at[:, None]) * RANK + ranks[None, :], mask=there[:, None] & (ranks < RANK)[None, :], other=0.0
    )  # fmt: skip
    if UPCAST:
        b = b.to(tl.float32)
    more = tl.dot(hidden.to(b.dtype), tl.trans(b), input_precision="ieee").to(tl.float32)
    where = y_ptr + rows[:, None] * OUT + at[None, :]
    real = (rows >= 0)[:, None] & there[None, :]
    y = tl.load(where, mask=real, other=0.0).to(tl.float32)
    tl.store(where, (y + more).to(y_ptr.dtype.element_ty), mask=real)


def block_of(rank: int) -> int:
    """How many inputs, or outputs, a program takes at a time: fewer the higher the rank."""
    return max(16, min(256 if INTERPRETED else 128, TILE_NUMBERS // rank))


def add_low_rank_triton(y: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    """`add_low_rank`, with the same arguments; y is contiguous."""
    tile_place, tile_rows = groups.tiles
    num_tiles, rank = len(tile_place), a.shape[1]
    if not num_tiles:
        return y
    x = x.to(a.dtype).contiguous()
    size_in, size_out, padded_rank = x.shape[-1], y.shape[-1], max(16, next_power_of_2(rank))
    block = block_of(padded_rank)
    num_splits = 1 if INTERPRETED else min(MOST_SPLITS, triton.cdiv(size_in, block))
    hidden = torch.empty(num_splits, num_tiles * TILE_ROWS, padded_rank, dtype=torch.float32, device=x.device)
    own = {"RANK": rank, "PADDED_RANK": padded_rank, "ROWS": TILE_ROWS, "NUM_SPLITS": num_splits, "UPCAST": INTERPRETED}
    _shrink[(num_tiles, num_splits)](x, a, hidden, tile_place, tile_rows, IN=size_in, BLOCK_K=block, **own)
    grid = (num_tiles, triton.cdiv(size_out, block))
    _expand[grid](y, b, hidden, tile_place, tile_rows, OUT=size_out, BLOCK_N=block, **own)
    return y
