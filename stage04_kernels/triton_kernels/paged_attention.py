"""Paged attention in Triton (vLLM: v1/attention/ops/triton_unified_attention.py, kernel_unified_attention).

One kernel for every batch: prompts, chunks of prompts and decodes together, over a block table. Sources: Kwon et al. 2023
(PagedAttention), Milakov and Gimelshein 2018 (online softmax), Dao 2023 (FlashAttention-2), Dao et al. 2023 (Flash-Decoding).

**Rows.** A program takes some query tokens of one request and one key/value head. All `GROUP` query heads that share this
head come along: row m of the tile is head `m % GROUP` of token `m // GROUP`. So a key is loaded once for all of them, and a decode
of a model with grouped heads fills more than one row of the matrix unit.

**Online softmax.** The weights of a softmax, exp(s_i - max) / sum, seem to need all scores before the first value can be
used. They do not. Keep for each row the largest score so far, `largest`; the sum of exp(s - largest), `total`; and the values weighted by
the same, `mixed`. When a new block of keys brings a larger score, what was summed so far is too large by the factor
exp(new - old), so multiply it by exp(old - new) and go on. At the end mixed / total is the exact result, whatever the order of
the blocks, and no row of scores was ever stored.

**Splits.** A decode has one query token, so a batch of few long requests gives few programs, and most of the chip is idle.
With `NUM_SPLITS` > 1 several programs share a row's keys. Each leaves its own softmax over its part, with the logarithm of its
sum (log-sum-exp), and `_reduce_splits` weighs the parts by these.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.sampler import to_device
from stage04_kernels.triton_kernels.tiles import DEFAULT_TILES, AttentionTiles, Tile, next_power_of_2, num_programs

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys_of_program(
    first_token, query_len, context, window, split,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The positions begin..end-1 that any row of this tile sees, and of them this program's split."""
    last_token = tl.minimum(first_token + TOKENS, query_len) - 1
    end = context - query_len + last_token + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context - query_len + first_token + 1 - window, 0)
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, NUM_SPLITS), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(begin + share, end)
    return begin, end


@triton.jit
def _load_blocks(table_ptr, key_position, end, BLOCK_SIZE: tl.constexpr):
    """The block of each position, from the request's row of the block table: [BLOCK_N]."""
    return tl.load(table_ptr + key_position // BLOCK_SIZE, mask=key_position < end, other=0)


@triton.jit
def _load_keys_and_values(
    key_ptr, value_ptr, block, key_position, real_key, dim, real_dim, kv_head, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys and values at these positions, which lie in these blocks, in DTYPE: [BLOCK_N, PADDED_DIM] each."""
    slot = block.to(tl.int64) * BLOCK_SIZE + key_position % BLOCK_SIZE
    at = (slot[:, None] * num_kv_heads + kv_head) * HEAD_DIM + dim[None, :]
    real = real_key[:, None] & real_dim[None, :]
    key = tl.load(key_ptr + at, mask=real, other=0.0)
    value = tl.load(value_ptr + at, mask=real, other=0.0)
    return key.to(DTYPE), value.to(DTYPE)


@triton.jit
def _scores(query, key, key_position, first_seen, last_seen, scale, HAS_WINDOW: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N], times `scale`; -inf where a row does not see a key."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee").to(tl.float32) * scale
    visible = key_position[None, :] <= last_seen[:, None]
    if HAS_WINDOW:
        visible = visible & (key_position[None, :] >= first_seen[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _softmax_step(scores, value, largest, total, mixed):
    """One iteration of the online softmax: `largest`, `total` and `mixed` after these keys."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that has seen nothing yet
    rescale = tl.exp2(largest - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * rescale + tl.sum(weights, 1)
    mixed = mixed * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee").to(tl.float32)
    return new_largest, total, mixed


@triton.jit
def _store_rows(
    out_ptr, lse_ptr, out_row, real_row, dim, real_dim, largest, total, mixed,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """The result of the softmax and, for a split, the logarithm of its sum. A split that saw no key leaves zeros, with the
    weight exp(-inf)."""
    saw_none = total == 0.0
    total = tl.where(saw_none, 1.0, total)
    at = out_row[:, None] * HEAD_DIM + dim[None, :]
    result = (mixed * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=real_row[:, None] & real_dim[None, :])
    if NUM_SPLITS > 1:
        lse = tl.where(saw_none, float("-inf"), largest + tl.log2(total))
        tl.store(lse_ptr + out_row, lse / LOG2E, mask=real_row)


@triton.jit
def _paged_attention(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
    tile_request_ptr, tile_first_ptr, scale, window,
    stride_query_token, stride_query_head, stride_table, num_kv_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of query rows, one key/value head, one split of the keys.

    out [num_tokens, num_heads, NUM_SPLITS, HEAD_DIM]; lse [num_tokens, num_heads, NUM_SPLITS] float32, written if there are
    splits; query [num_tokens, num_heads, HEAD_DIM]; key and value [num_slots, num_kv_heads, HEAD_DIM]; int32: block_table
    [num_reqs, max_blocks], seq_lens [num_reqs], query_start_loc [num_reqs + 1], each tile's request and first query token
    within it, tile_request and tile_first [num_tiles]. PADDED_DIM is HEAD_DIM as a power of two, GROUP the query heads per
    key/value head, BLOCK_M the rows of a tile, BLOCK_N the keys of an iteration.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first_token = tl.load(tile_request_ptr + tile), tl.load(tile_first_ptr + tile)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    context = tl.load(seq_lens_ptr + request)

    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP  # within the request
    head = kv_head * GROUP + row % GROUP
    real_row, real_dim = (row // GROUP < BLOCK_M // GROUP) & (token < query_len), dim < HEAD_DIM
    position = context - query_len + token  # in the context
    query_row = (query_start + token).to(tl.int64)
    query_at = query_row[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :]
    query = tl.load(query_ptr + query_at, mask=real_row[:, None] & real_dim[None, :], other=0.0)
    if UPCAST:  # multiply in float32: the interpreter's bfloat16 is wrong
        query = query.to(tl.float32)

    begin, end = _keys_of_program(
        first_token, query_len, context, window, split, BLOCK_M // GROUP, BLOCK_N, NUM_SPLITS, HAS_WINDOW
    )
    first_seen, last_seen = position - window + 1, tl.where(real_row, tl.minimum(position, end - 1), -1)
    scale = scale * LOG2E  # exp2 is the chip's own exponential
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    block = _load_blocks(table_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        real_key = key_position < end
        # A turn early: where keys and values wait for a load of the same turn, Triton's pipeline spends its stages on that.
        next_block = _load_blocks(table_ptr, key_position + BLOCK_N, end, BLOCK_SIZE)
        key, value = _load_keys_and_values(
            key_ptr, value_ptr, block, key_position, real_key, dim, real_dim, kv_head, num_kv_heads,
            HEAD_DIM, BLOCK_SIZE, query.dtype,
        )  # fmt: skip
        scores = _scores(query, key, key_position, first_seen, last_seen, scale, HAS_WINDOW)
        largest, total, mixed = _softmax_step(scores, value, largest, total, mixed)
        block = next_block
    out_row = (query_row * (num_kv_heads * GROUP) + head) * NUM_SPLITS + split
    _store_rows(out_ptr, lse_ptr, out_row, real_row, dim, real_dim, largest, total, mixed, HEAD_DIM, NUM_SPLITS)


@triton.jit
def _reduce_splits(
    out_ptr,  # [num_rows, HEAD_DIM]
    part_ptr,  # [num_rows, NUM_SPLITS, HEAD_DIM] float32
    part_lse_ptr,  # [num_rows, NUM_SPLITS] float32; -inf: the split saw nothing
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # a power of two
):
    """Each part is a softmax over its own keys; exp(lse) is what it weighs among all of them."""
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    lse = tl.load(part_lse_ptr + row * NUM_SPLITS + split)
    largest = tl.max(lse, 0)
    weights = tl.exp(lse - largest)
    total = tl.sum(weights, 0)
    real_dim = dim < HEAD_DIM
    at = (row * NUM_SPLITS + split[:, None]) * HEAD_DIM + dim[None, :]
    parts = tl.load(part_ptr + at, mask=real_dim[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out_ptr + row * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask=real_dim)


def plan_tiles(metadata: AttentionMetadata, tokens_per_tile: int) -> tuple[Tensor, Tensor]:
    """Cut every request's query tokens into tiles: (request, first token within it) of each, two int32 [num_tiles]."""
    requests: list[int] = []
    firsts: list[int] = []
    starts = metadata.query_start_loc_cpu
    for request in range(len(starts) - 1):
        for first in range(0, starts[request + 1] - starts[request], tokens_per_tile):
            requests.append(request)
            firsts.append(first)
    tiles = np.array([requests, firsts], dtype=np.int32)
    tile_request, tile_first = to_device([tiles[0], tiles[1]], metadata.block_table.device)
    return tile_request, tile_first


def tiles_of(
    query: Tensor, num_kv_heads: int, metadata: AttentionMetadata, tiles: AttentionTiles, window: int | None = None
) -> tuple[Tile, tuple[Tensor, Tensor]]:
    """What a program takes at a time, and how the step is cut for that; the first layer computes it, the others use it again."""
    num_heads, head_dim = query.shape[1:]
    padded_dim = max(16, next_power_of_2(head_dim))
    tile = tiles.tile(num_heads // num_kv_heads, metadata.max_query_len, padded_dim, query.itemsize, window is not None)
    tokens = tile.rows * num_kv_heads // num_heads
    if ("triton", tokens) not in metadata.plans:
        metadata.plans["triton", tokens] = plan_tiles(metadata, tokens)
    plan: tuple[Tensor, Tensor] = metadata.plans["triton", tokens]
    return tile, plan


def choose_num_splits(num_tiles: int, num_kv_heads: int, metadata: AttentionMetadata, tiles: AttentionTiles) -> int:
    """As many programs as the chip runs at once, but at least `min_split` keys for each; a power of two."""
    programs = num_tiles * num_kv_heads
    wanted = min(num_programs(metadata.block_table.device) // max(1, programs), metadata.max_seq_len // tiles.min_split)
    return 1 if metadata.max_query_len > 1 or wanted < 2 else min(64, next_power_of_2(wanted + 1) // 2)


def paged_attention_triton(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    *,
    num_splits: int | None = None,
    tiles: AttentionTiles = DEFAULT_TILES,
    launch: Callable[..., None] | None = None,
) -> Tensor:
    """Attention of a step's query tokens over the paged cache. Arguments as in `AttentionBackend`; also

    num_splits  programs that share one row's keys, a power of two; None = chosen from batch and chip
    tiles       how the batch is cut
    launch      of another kernel over the same tiles, for a cache of another form; called as `_launch` is

    Padding rows of the query come out as zeros.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    padded_dim = max(16, next_power_of_2(head_dim))
    tile, plan = tiles_of(query, num_kv_heads, metadata, tiles, window)
    if num_splits is None:
        num_splits = choose_num_splits(len(plan[0]), num_kv_heads, metadata, tiles)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    if len(plan[0]) == 0:
        return out
    launch = launch or _launch
    if num_splits == 1:
        launch(out, out, query, kv_cache, metadata, plan, scale, window, 1, tile, tiles)
        return out
    part = torch.zeros(num_tokens, num_heads, num_splits, head_dim, device=query.device)
    part_lse = torch.zeros(num_tokens, num_heads, num_splits, device=query.device)
    launch(part, part_lse, query, kv_cache, metadata, plan, scale, window, num_splits, tile, tiles)
    _reduce_splits[(num_tokens * num_heads,)](
        out, part, part_lse, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, NUM_SPLITS=num_splits, num_warps=1,
    )  # fmt: skip
    return out


def _launch(
    out: Tensor, lse: Tensor, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, plan: tuple[Tensor, Tensor],
    scale: float, window: int | None, num_splits: int, tile: Tile, tiles: AttentionTiles,
) -> None:  # fmt: skip
    """Launch `_paged_attention`: the window's presence, and every size of a tile, is a constant of the compiled kernel."""
    query = query if query.stride(2) == 1 else query.contiguous()
    head_dim, block_size, num_kv_heads = query.shape[2], *kv_cache.shape[2:4]
    padded_dim = max(16, next_power_of_2(head_dim))
    _paged_attention[(len(plan[0]), num_kv_heads, num_splits)](
        out, lse, query, kv_cache[0], kv_cache[1], metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        *plan, scale, window or 0,
        query.stride(0), query.stride(1), metadata.block_table.stride(0), num_kv_heads,
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size, GROUP=query.shape[1] // num_kv_heads,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, NUM_SPLITS=num_splits, HAS_WINDOW=window is not None,
        UPCAST=tiles.upcast, num_warps=tile.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
