"""Attention over 8-bit codes, and the write, in Triton (vLLM: triton_reshape_and_cache_flash_per_token_head_quant, kernel_unified_attention).

The kernel of `triton_kernels/paged_attention.py`, with tiles of codes in the place of tiles of numbers: half the bytes are read, or a quarter. A code is
exact in every number format of a model, so the matrix unit multiplies codes of keys, and a key's scale multiplies its scores; a value's scale
multiplies its codes, before they are rounded to the model's format as in the slow twin.

Codes are taken apart by integer arithmetic: so all chips, Triton's versions and its interpreter have the same fp8.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.attention import AttentionBackend, AttentionMetadata, Rotation
from stage04_kernels.features.kv_cache_8bit.formats import SMALLEST_SCALE, KVFormat
from stage04_kernels.paged_attention import rotated
from stage04_kernels.triton_kernels.paged_attention import (
    LOG2E,
    _keys_of_program,
    _load_blocks,
    _scores,
    _softmax_step,
    _store_rows,
    paged_attention_triton,
)
from stage04_kernels.triton_kernels.tiles import AttentionTiles, Tile, next_power_of_2

MANTISSA = {"int8": 0, "float8_e4m3fn": 3, "float8_e5m2": 2}
"""Bits of the mantissa: a kernel's name for the format of its codes. 0: they are whole numbers."""
SMALLEST = tl.constexpr(SMALLEST_SCALE)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: a float32 this large has no place for fractions


@triton.jit
def _decode(code, MANTISSA: tl.constexpr):
    """float32 of codes, uint8."""
    if MANTISSA == 0:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    LAST: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7B  # above it there are infinity and NaN
    wide = code.to(tl.int32)
    rest = wide & 0x7F
    bits = rest << (23 - MANTISSA)
    normal = (bits + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    # without an exponent: steps below the smallest normal number
    below = (bits + ((128 - BIAS) << 23)).to(tl.float32, bitcast=True) - 2.0 ** (1 - BIAS)
    size = tl.where(rest < (1 << MANTISSA), below, normal)
    size = tl.where(rest > LAST, float("nan"), size)
    return tl.where(wide > 0x7F, -size, size)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr):
    """Codes, uint8, of float32 numbers within the format's range; to the nearest, ties to even."""
    if MANTISSA == 0:
        return ((x + ROUNDING) - ROUNDING).to(tl.int8).to(tl.uint8, bitcast=True)
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = (size + ((1 << (22 - MANTISSA)) - 1) + ((size >> (23 - MANTISSA)) & 1)) >> (23 - MANTISSA)
    normal = rounded - ((127 - BIAS) << MANTISSA)
    below = ((tl.abs(x) * 2.0 ** (BIAS - 1 + MANTISSA) + ROUNDING) - ROUNDING).to(tl.int32)
    code = tl.where(size < ((128 - BIAS) << 23), below, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_heads(
    x_ptr, code_ptr, scale_ptr, head, dim, real,
    HEAD_DIM: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """All heads of one token: codes to `code_ptr`, scales to `scale_ptr`."""
    x = tl.load(x_ptr + head[:, None] * HEAD_DIM + dim[None, :], mask=real, other=0.0).to(tl.float32)
    if HAS_SCALES:
        scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full(head.shape, LARGEST, tl.float32))
        nan = tl.max((x != x).to(tl.int32), 1) > 0  # a maximum may pass over it
        scale = tl.where(nan, float("nan"), tl.where(scale < SMALLEST, 0.0, scale))
        tl.store(scale_ptr + head, scale, mask=tl.max(real.to(tl.int32), 1) > 0)
        step = tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(x)
        x = tl.where(scale[:, None] == 0.0, 0.0, tl.div_rn(x, step))
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    tl.store(code_ptr + head[:, None] * HEAD_DIM + dim[None, :], _encode(x, MANTISSA), mask=real)


@triton.jit
def _write_kv_8bit(
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value_ptr,
    key_cache_ptr,  # uint8 [num_blocks, BLOCK_BYTES]
    value_cache_ptr,
    key_scale_ptr,  # the same memory, float32
    value_scale_ptr,
    slot_mapping_ptr,  # [num_tokens] int64; -1 = padding
    stride_key,
    stride_value,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head, dim = tl.arange(0, PADDED_KV_HEADS), tl.arange(0, PADDED_DIM)
    real = (head < NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    block, row = slot // BLOCK_SIZE, (slot % BLOCK_SIZE) * NUM_KV_HEADS
    codes = block * BLOCK_BYTES + row * HEAD_DIM
    scales = block * (BLOCK_BYTES // 4) + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 4 + row
    _write_heads(
        key_ptr + token * stride_key, key_cache_ptr + codes, key_scale_ptr + scales, head, dim, real,
        HEAD_DIM, LARGEST, MANTISSA, HAS_SCALES,
    )  # fmt: skip
    _write_heads(
        value_ptr + token * stride_value, value_cache_ptr + codes, value_scale_ptr + scales, head, dim, real,
        HEAD_DIM, LARGEST, MANTISSA, HAS_SCALES,
    )  # fmt: skip


@triton.jit
def _paged_attention_8bit(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, block_table_ptr, seq_lens_ptr,
    query_start_loc_ptr, tile_request_ptr, tile_first_ptr, scale, window,
    stride_query_token, stride_query_head, stride_table,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, UPCAST: tl.constexpr, MANTISSA: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """As `_paged_attention`, line by line; keys and values are uint8 [num_blocks, BLOCK_BYTES], and their scales the same memory as float32."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first_token = tl.load(tile_request_ptr + tile), tl.load(tile_first_ptr + tile)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    context = tl.load(seq_lens_ptr + request)

    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_DIM)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real_row, real_dim = (row // GROUP < BLOCK_M // GROUP) & (token < query_len), dim < HEAD_DIM
    position = context - query_len + token
    query_row = (query_start + token).to(tl.int64)
    query_at = query_row[:, None] * stride_query_token + head[:, None] * stride_query_head + dim[None, :]
    query = tl.load(query_ptr + query_at, mask=real_row[:, None] & real_dim[None, :], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    begin, end = _keys_of_program(
        first_token, query_len, context, window, split, BLOCK_M // GROUP, BLOCK_N, NUM_SPLITS, HAS_WINDOW
    )
    first_seen, last_seen = position - window + 1, tl.where(real_row, tl.minimum(position, end - 1), -1)
    scale = scale * LOG2E
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    block = _load_blocks(table_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        real_key = key_position < end
        next_block = _load_blocks(table_ptr, key_position + BLOCK_N, end, BLOCK_SIZE)
        place = (key_position % BLOCK_SIZE) * NUM_KV_HEADS + kv_head  # in its block
        at = (block.to(tl.int64) * BLOCK_BYTES + place * HEAD_DIM)[:, None] + dim[None, :]
        real = real_key[:, None] & real_dim[None, :]
        key = _decode(tl.load(key_ptr + at, mask=real, other=0), MANTISSA)
        value = _decode(tl.load(value_ptr + at, mask=real, other=0), MANTISSA)
        factor = scale
        if HAS_SCALES:
            at = block.to(tl.int64) * (BLOCK_BYTES // 4) + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM // 4 + place
            factor = scale * tl.load(key_scale_ptr + at, mask=real_key, other=0.0)[None, :]
            value = value * tl.load(value_scale_ptr + at, mask=real_key, other=0.0)[:, None]
        value = value.to(query.dtype)
        scores = _scores(query, key.to(query.dtype), key_position, first_seen, last_seen, factor, HAS_WINDOW)
        largest, total, mixed = _softmax_step(scores, value, largest, total, mixed)
        block = next_block
    out_row = (query_row * (NUM_KV_HEADS * GROUP) + head) * NUM_SPLITS + split
    _store_rows(out_ptr, lse_ptr, out_row, real_row, dim, real_dim, largest, total, mixed, HEAD_DIM, NUM_SPLITS)


def _memory(kv_cache: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values as bytes, and as float32; without scales nobody reads the latter."""
    keys, values = (side.flatten() for side in kv_cache)
    if not kv_format.has_scales:
        return keys, values, keys, values
    return keys, values, keys.view(torch.float32), values.view(torch.float32)


def write_kv_8bit_triton(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_format: KVFormat
) -> None:
    """As `write_kv_8bit`; the host waits for no answer."""
    if len(key) == 0:
        return
    key, value = (x if x[0].is_contiguous() else x.contiguous() for x in (key, value))
    num_kv_heads, head_dim, block_size = *key.shape[1:], kv_cache.shape[2]
    _write_kv_8bit[(len(key),)](
        key, value, *_memory(kv_cache, kv_format), slot_mapping, key.stride(0), value.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED_KV_HEADS=next_power_of_2(num_kv_heads),
        PADDED_DIM=next_power_of_2(head_dim), BLOCK_SIZE=block_size,
        BLOCK_BYTES=block_size * num_kv_heads * kv_format.head_bytes(head_dim), LARGEST=kv_format.largest,
        MANTISSA=MANTISSA[kv_format.dtype], HAS_SCALES=kv_format.has_scales, num_warps=4,
    )  # fmt: skip


def num_keys(tile: Tile, itemsize: int, head_dim: int) -> int:
    """Keys per iteration: codes on their way to float32 take registers that the tile for large heads in float32 does not leave."""
    return tile.keys // 2 if itemsize == 4 and head_dim > 64 else tile.keys


def launch_8bit(
    out: Tensor, lse: Tensor, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, plan: tuple[Tensor, Tensor],
    scale: float, window: int | None, num_splits: int, tile: Tile, tiles: AttentionTiles, kv_format: KVFormat,
) -> None:  # fmt: skip
    """What `paged_attention_triton` launches over a cache of codes."""
    query = query if query.stride(2) == 1 else query.contiguous()
    head_dim, block_size, num_kv_heads = query.shape[2], *kv_cache.shape[2:4]
    keys = num_keys(tile, query.itemsize, head_dim)
    _paged_attention_8bit[(len(plan[0]), num_kv_heads, num_splits)](
        out, lse, query, *_memory(kv_cache, kv_format), metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        *plan, scale, window or 0, query.stride(0), query.stride(1), metadata.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED_DIM=max(16, next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
        BLOCK_BYTES=block_size * num_kv_heads * kv_format.head_bytes(head_dim), GROUP=query.shape[1] // num_kv_heads,
        BLOCK_M=tile.rows, BLOCK_N=keys, NUM_SPLITS=num_splits, HAS_WINDOW=window is not None, UPCAST=tiles.upcast,
        MANTISSA=MANTISSA[kv_format.dtype], HAS_SCALES=kv_format.has_scales, num_warps=tile.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


def triton_attention_8bit(other: AttentionBackend, kv_format: KVFormat) -> AttentionBackend:
    """The attention over a cache of codes; `other`, the slow twin, is not needed. Queries and keys are rotated before, in torch."""
    launch = partial(launch_8bit, kv_format=kv_format)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        query, key = rotated(query, key, rotation)
        write_kv_8bit_triton(key, value, kv_cache, metadata.slot_mapping, kv_format)
        return paged_attention_triton(query, kv_cache, metadata, scale, window, launch=launch)

    return attention
