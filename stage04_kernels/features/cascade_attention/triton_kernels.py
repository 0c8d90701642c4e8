"""Cascade attention in Triton (vLLM: cascade_attention and merge_attn_states in v1/attention; FlashInfer's cascade, Ye et al. 2024).

Three launches for one layer. The **prefix pass** takes the query rows of all requests that share their first blocks as the rows of one tile, as if they
were tokens of one prompt: a key is loaded once for all of them. The **own pass** is `_paged_attention` over what each request has by itself; in its
metadata contexts are shorter and block tables begin later, nothing else. The **merge** weighs the parts of a row by their log-sum-exp.

The sum is another order of the same numbers, so it rounds differently from one pass. With e = 2**-24 and the largest score s, a part's logarithm is off by
at most (|s| + log n + 4) e for n keys, and its weight by as much of itself: in float32 a result is off by less than 4 (|s| + log n + 8) e max|value|.
In bfloat16 the weights of keys are rounded as in one pass, by 2**-9, and the result once more, so two ways differ by less than 2**-7 max|value|.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.attention import AttentionBackend, AttentionMetadata, Rotation
from stage04_kernels.features.cascade_attention.plan import KEY, CascadePlan, cut_rows
from stage04_kernels.triton_kernels.backend import rotate_and_write
from stage04_kernels.triton_kernels.paged_attention import (
    LOG2E,
    _keys_of_program,
    _launch,
    _load_blocks,
    _load_keys_and_values,
    _scores,
    _softmax_step,
    _store_rows,
    choose_num_splits,
    tiles_of,
)
from stage04_kernels.triton_kernels.tiles import DEFAULT_TILES, AttentionTiles, Tile, next_power_of_2, num_programs


@triton.jit
def _attend_shared_prefix(
    part_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, prefix_table_ptr, prefix_lens_ptr, rows_ptr,
    tile_prefix_ptr, tile_first_ptr, tile_end_ptr, scale,
    stride_query_token, stride_query_head, stride_table, num_kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of several requests, one key/value head, one split of the prefix, of which every row sees all.

    As `_paged_attention`, but for: int32 prefix_table [num_prefixes, most blocks], prefix_lens [num_prefixes], rows [num_rows], and each tile's prefix and its
    first and last + 1 place in `rows`.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prefix = tl.load(tile_prefix_ptr + tile)
    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    place = tl.load(tile_first_ptr + tile) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real_row, real_dim = (row // GROUP < BLOCK_M // GROUP) & (place < tl.load(tile_end_ptr + tile)), dim < HEAD_DIM
    query_row = tl.load(rows_ptr + place, mask=real_row, other=0).to(tl.int64)
    query_at = query_row[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :]
    query = tl.load(query_ptr + query_at, mask=real_row[:, None] & real_dim[None, :], other=0.0)
    if UPCAST:  # multiply in float32: the interpreter's bfloat16 is wrong
        query = query.to(tl.float32)

    begin, end = _keys_of_program(0, 1, tl.load(prefix_lens_ptr + prefix), 0, split, 1, BLOCK_N, NUM_SPLITS, False)
    last_seen = tl.where(real_row, end - 1, -1)
    scale = scale * LOG2E
    table_ptr = prefix_table_ptr + prefix.to(tl.int64) * stride_table
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    block = _load_blocks(table_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        next_block = _load_blocks(table_ptr, key_position + BLOCK_N, end, BLOCK_SIZE)
        key, value = _load_keys_and_values(
            key_ptr, value_ptr, block, key_position, key_position < end, dim, real_dim, kv_head, num_kv_heads,
            HEAD_DIM, BLOCK_SIZE, query.dtype,
        )  # fmt: skip
        scores = _scores(query, key, key_position, last_seen, last_seen, scale, False)
        largest, total, mixed = _softmax_step(scores, value, largest, total, mixed)
        block = next_block
    part_row = (query_row * (num_kv_heads * GROUP) + head) * NUM_SPLITS + split
    _store_rows(part_ptr, lse_ptr, part_row, real_row, dim, real_dim, largest, total, mixed, HEAD_DIM, NUM_SPLITS)


@triton.jit
def _load_parts(
    part_ptr, lse_ptr, row, dim, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp [NUM_SPLITS] and results [NUM_SPLITS, PADDED_DIM] of one row. A part that saw nothing is not read: nobody may have written it."""
    at = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    lse = tl.load(lse_ptr + at)
    real = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    return lse, tl.load(part_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=real, other=0.0)


@triton.jit
def _merge_parts(
    out_ptr,  # [num_rows, HEAD_DIM]
    prefix_ptr,  # [num_rows, PREFIX_SPLITS, HEAD_DIM] float32
    prefix_lse_ptr,  # [num_rows, PREFIX_SPLITS] float32; -inf: the row has no prefix
    own_ptr,  # [num_rows, OWN_SPLITS, HEAD_DIM] float32
    own_lse_ptr,  # [num_rows, OWN_SPLITS] float32
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    OWN_SPLITS: tl.constexpr,
):
    """One query row and head: each part weighs exp(lse). A row without any part pads the batch, and becomes zeros."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_DIM)
    prefix_lse, prefix = _load_parts(prefix_ptr, prefix_lse_ptr, row, dim, HEAD_DIM, PREFIX_SPLITS)
    own_lse, own = _load_parts(own_ptr, own_lse_ptr, row, dim, HEAD_DIM, OWN_SPLITS)
    largest = tl.maximum(tl.max(prefix_lse, 0), tl.max(own_lse, 0))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    prefix_weight, own_weight = tl.exp(prefix_lse - largest), tl.exp(own_lse - largest)
    total = tl.sum(prefix_weight, 0) + tl.sum(own_weight, 0)
    mixed = tl.sum(prefix * prefix_weight[:, None], 0) + tl.sum(own * own_weight[:, None], 0)
    result = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def prefix_tile(tiles: AttentionTiles, group: int, num_rows: int, padded_dim: int, itemsize: int) -> Tile:
    """The tile of a prompt with so many tokens. Where each row lies takes registers, as a window's second comparison does: hence `has_window`."""
    tile = tiles.tile(group, num_rows, padded_dim, itemsize, True)
    return replace(tile, keys=tile.keys // 2) if itemsize == 4 and padded_dim == 128 else tile


def choose_prefix_splits(num_tiles: int, num_kv_heads: int, plan: CascadePlan, tiles: AttentionTiles) -> int:
    """As many programs as the chip runs at once, but at least `min_split` keys for each; a power of two, and two at least."""
    wanted = min(
        num_programs(plan.rows.device) // (num_tiles * num_kv_heads), plan.max_prefix_len // tiles.min_split, 64
    )
    return max(2, next_power_of_2(wanted + 1) // 2)


def cascade_attention_triton(
    query: Tensor, kv_cache: Tensor, plan: CascadePlan, scale: float, *, tiles: AttentionTiles = DEFAULT_TILES
) -> Tensor:
    """Attention of a step's query tokens over the paged cache, with no window. Padding rows of the query come out as zeros."""
    query = query if query.stride(2) == 1 else query.contiguous()
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group, padded_dim = num_heads // num_kv_heads, max(16, next_power_of_2(head_dim))
    tile = prefix_tile(tiles, group, max(plan.rows_per_prefix), padded_dim, query.itemsize)
    cut = cut_rows(plan, tile.rows // group)
    prefix_splits = choose_prefix_splits(len(cut[0]), num_kv_heads, plan, tiles)
    part = torch.empty(num_tokens, num_heads, prefix_splits, head_dim, device=query.device)
    part_lse = torch.full((num_tokens, num_heads, prefix_splits), float("-inf"), device=query.device)
    _attend_shared_prefix[(len(cut[0]), num_kv_heads, prefix_splits)](
        part, part_lse, query, kv_cache[0], kv_cache[1], plan.prefix_table, plan.prefix_lens, plan.rows, *cut, scale,
        query.stride(0), query.stride(1), plan.prefix_table.stride(0), num_kv_heads,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size, GROUP=group, BLOCK_M=tile.rows,
        BLOCK_N=tile.keys, NUM_SPLITS=prefix_splits, UPCAST=tiles.upcast, num_warps=tile.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    own_tile, own_cut = tiles_of(query, num_kv_heads, plan.own, tiles)
    own_splits = max(2, choose_num_splits(len(own_cut[0]), num_kv_heads, plan.own, tiles))
    own = torch.empty(num_tokens, num_heads, own_splits, head_dim, device=query.device)
    own_lse = torch.full((num_tokens, num_heads, own_splits), float("-inf"), device=query.device)
    _launch(own, own_lse, query, kv_cache, plan.own, own_cut, scale, None, own_splits, own_tile, tiles)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _merge_parts[(num_tokens * num_heads,)](
        out, part, part_lse, own, own_lse, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, PREFIX_SPLITS=prefix_splits,
        OWN_SPLITS=own_splits, num_warps=1,
    )  # fmt: skip
    return out


def with_cascade(other: AttentionBackend) -> AttentionBackend:
    """The attention of the Triton backend, `other`, in two passes where a step has a plan for that. Layers with a sliding window have none: what
    their requests see of a prefix differs."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        plan: CascadePlan | None = metadata.plans.get(KEY)
        if plan is None or window is not None:
            return other(query, key, value, kv_cache, metadata, scale, window, rotation)
        query = rotate_and_write(query, key, value, kv_cache, metadata, rotation)
        return cascade_attention_triton(query, kv_cache, plan, scale)

    return attention
