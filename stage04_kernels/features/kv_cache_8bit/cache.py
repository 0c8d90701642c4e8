"""A paged KV cache of 8-bit codes in torch: slow and obvious, the twin of all kernels that read or write one.

The cache of one layer is one uint8 tensor [2, num_blocks, block_size, num_kv_heads, head_bytes], as large as its name says; but within a block
the codes of all its heads come first, [block_size, num_kv_heads, head_dim], and then their scales, [block_size, num_kv_heads] float32, if the format
has any. So codes lie side by side for wide loads, and whoever moves a block (swapping, the folder of blocks) moves its scales too.
vLLM has int8 and fp8 with a scale per token and head in its Triton backend (v1/attention/ops/triton_reshape_and_cache_flash.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.features.kv_cache_8bit.formats import SMALLEST_SCALE, KVFormat
from stage04_kernels.paged_attention import PADDING_SLOT


def codes_of(kv_cache: Tensor, kv_format: KVFormat) -> Tensor:
    """The codes, a view: uint8 [2, num_blocks, block_size, num_kv_heads, head_dim]."""
    block_size, num_kv_heads, head_bytes = kv_cache.shape[2:]
    shape = (block_size, num_kv_heads, kv_format.head_dim(head_bytes))
    return kv_cache.flatten(2)[..., : shape[0] * shape[1] * shape[2]].unflatten(-1, shape)


def scales_of(kv_cache: Tensor, kv_format: KVFormat) -> Tensor | None:
    """The scales, a view: float32 [2, num_blocks, block_size, num_kv_heads]; None if the format has none."""
    if not kv_format.has_scales:
        return None
    block_size, num_kv_heads, head_bytes = kv_cache.shape[2:]
    codes = block_size * num_kv_heads * kv_format.head_dim(head_bytes)
    return kv_cache.flatten(2)[..., codes:].view(torch.float32).unflatten(-1, (block_size, num_kv_heads))


def quantize(x: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor | None]:
    """x [..., head_dim] -> (codes uint8 of the same shape, scales [...] float32 or None).

    No number is wrong by more than half a step: for int8 the scale, for fp8 the distance to its neighbour. Without scales, larger numbers than the
    format's largest become it. NaN stays NaN, and with scales it makes its whole head NaN, as an infinite number does.
    """
    x, scales = x.float(), None
    if kv_format.has_scales:
        scales = x.abs().amax(dim=-1) / kv_format.largest
        scales = scales.masked_fill(scales < SMALLEST_SCALE, 0.0)
        x = torch.where(scales[..., None] == 0, 0.0, x / scales[..., None])
    x = x.clamp(-kv_format.largest, kv_format.largest)
    codes = (x.round() if kv_format.dtype == "int8" else x).to(getattr(torch, kv_format.dtype))
    return codes.view(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor | None, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """The numbers [..., head_dim] that codes and scales stand for."""
    x = codes.view(getattr(torch, kv_format.dtype)).float()
    return (x if scales is None else x * scales[..., None]).to(dtype)


def as_stored(x: Tensor, kv_format: KVFormat) -> Tensor:
    """What is left of x [..., head_dim] once it was written and read."""
    return dequantize(*quantize(x, kv_format), kv_format, x.dtype)


def write_kv_8bit(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_format: KVFormat) -> None:
    """As `write_kv`, into a cache of codes.

    key, value    [num_tokens, num_kv_heads, head_dim]
    slot_mapping  [num_tokens] int64; -1 marks a padding row, which is skipped; no slot twice
    """
    all_codes, all_scales, block_size = codes_of(kv_cache, kv_format), scales_of(kv_cache, kv_format), kv_cache.shape[2]
    real = slot_mapping != PADDING_SLOT
    block, offset = slot_mapping[real] // block_size, slot_mapping[real] % block_size
    for side, x in enumerate((key, value)):
        codes, scales = quantize(x[real], kv_format)
        all_codes[side][block, offset] = codes
        if all_scales is not None and scales is not None:
            all_scales[side][block, offset] = scales


def read_blocks(kv_cache: Tensor, blocks: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """These blocks as numbers: [2, len(blocks), block_size, num_kv_heads, head_dim]."""
    chosen = kv_cache[:, blocks]
    return dequantize(codes_of(chosen, kv_format), scales_of(chosen, kv_format), kv_format, dtype)
