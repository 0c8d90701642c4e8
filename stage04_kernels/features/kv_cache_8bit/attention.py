"""Attention over a KV cache of 8-bit codes: by any backend through a copy of what it reads, or by one that reads codes itself.

The copy holds the blocks of the step's requests as plain numbers, one layer at a time; the backend sees it as its cache. That is the slow twin, right for every
backend, a user's own included: it costs the memory of the copy, and saves no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionBackend, AttentionMetadata, Rotation, load
from stage04_kernels.features.kv_cache_8bit.cache import as_stored, read_blocks, write_kv_8bit
from stage04_kernels.features.kv_cache_8bit.formats import KVFormat
from stage04_kernels.paged_attention import PADDING_SLOT, rotated

_HERE = "stage04_kernels.features.kv_cache_8bit."
FAST = {
    "native": _HERE + "native:native_attention_8bit",
    "triton": _HERE + "triton_kernels:triton_attention_8bit",
    "triton-interpret": _HERE + "triton_kernels:triton_attention_8bit",
}
"""Backend -> what reads and writes codes itself, made with (the slow twin, the format)."""


@dataclass(frozen=True)
class CopyPlan:
    """Which blocks a step reads, and where its tokens lie in the copy of them."""

    blocks: Tensor  # [num_copied] int64: the null block, then those of each request
    metadata: AttentionMetadata  # the step's own, over the copy


def plan_copy(metadata: AttentionMetadata, block_size: int) -> CopyPlan:
    """The plan for this batch; the first layer makes it, the others use it again. Requests that share a block get a copy each."""
    key = ("kv_cache_8bit", block_size)
    if key not in metadata.plans:
        metadata.plans[key] = _make_plan(metadata, block_size)
    plan: CopyPlan = metadata.plans[key]
    return plan


def _make_plan(metadata: AttentionMetadata, block_size: int) -> CopyPlan:
    device, starts = metadata.block_table.device, metadata.query_start_loc_cpu
    counts = [-(-length // block_size) for length in metadata.seq_lens_cpu]  # rounded up
    table = torch.zeros(len(counts), max([1, *counts]), dtype=torch.int32, device=device)
    slots = torch.full_like(metadata.slot_mapping, PADDING_SLOT)
    blocks, first = [torch.zeros(1, dtype=torch.int64, device=device)], 1
    for request, (count, (start, end)) in enumerate(zip(counts, pairwise(starts))):
        blocks.append(metadata.block_table[request, :count].long())
        table[request, :count] = torch.arange(first, first + count, device=device)
        context = metadata.seq_lens_cpu[request]
        slots[start:end] = first * block_size + torch.arange(context - (end - start), context, device=device)
        first += count
    slots = torch.where(metadata.slot_mapping == PADDING_SLOT, PADDING_SLOT, slots)
    return CopyPlan(torch.cat(blocks), replace(metadata, block_table=table, slot_mapping=slots))


def through_a_copy(backend: AttentionBackend, kv_format: KVFormat) -> AttentionBackend:
    """`backend` over a cache of codes. A token attends to itself as it is stored, too: whether its key was computed in this step or found in the cache
    must not show."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        query, key = rotated(query, key, rotation)
        write_kv_8bit(key, value, kv_cache, metadata.slot_mapping, kv_format)
        plan = plan_copy(metadata, kv_cache.shape[2])
        copy = read_blocks(kv_cache, plan.blocks, kv_format, query.dtype)
        stored = as_stored(key, kv_format), as_stored(value, kv_format)
        return backend(query, *stored, copy, plan.metadata, scale, window, None)

    return attention


def with_scales(attention: AttentionBackend, key_scale: float, value_scale: float) -> AttentionBackend:
    """`attention` over a cache that holds key / key_scale and value / value_scale (vLLM: the scales of reshape_and_cache and of the kernels). Scores and
    results are linear in keys and values, so the scales go before and behind any kernel, which need not know them."""

    def scaled(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        stored = key / key_scale, value / value_scale
        out = attention(query, *stored, kv_cache, metadata, scale * key_scale, window, rotation)
        return out * value_scale

    return scaled


def choose_attention(backend: AttentionBackend, name: str, kv_format: KVFormat) -> tuple[str, AttentionBackend]:
    """(which path, the attention) for the backend that is called `name`, over a cache of codes."""
    twin = through_a_copy(backend, kv_format)
    if name not in FAST:
        return "copy", twin
    chosen: AttentionBackend = load(FAST[name])(twin, kv_format)
    return name, chosen
