"""The paged KV cache in torch: write keys and values, gather them again, attend (vLLM: reshape_and_cache_flash and
flash_attn_varlen_func with a block table).

The cache of one layer is one tensor [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values. A slot is a
token's place in it: slot = block_id * block_size + offset in the block. Query token i of a request with q tokens in this
step and a context of s tokens sees the keys at positions 0 to s - q + i, with a sliding window (Beltagy et al. 2020) of w
only the last w of these. Several query heads may share one key/value head (grouped-query attention, Ainslie et al. 2023):
head h reads key/value head h // (num_heads // num_kv_heads).
Source of paging: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from stage04_kernels.attention import AttentionBackend, AttentionMetadata, Rotation

PADDING_SLOT = -1
CPU_GROUP_POSITIONS = 1024
"""The most padded positions that one group of decodes gathers on a CPU: what is gathered should stay in the processor's cache
until it is read. Measured with one thread, GPT-2's 12 heads of 64, 64 decodes with 1 to 500 tokens of context: a layer took
99 ms with one group, 7 ms with groups of this size."""


def write_then_attend(write: Callable[..., None], attend: Callable[..., Tensor]) -> AttentionBackend:
    """A backend of two parts: keys and values go into the cache before any query reads it."""

    def backend(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        query, key = rotated(query, key, rotation)
        write(key, value, kv_cache, metadata.slot_mapping)
        return attend(query, kv_cache, metadata, scale, window)

    backend.parts = write, attend  # type: ignore[attr-defined]  # for those who want to call them one by one
    return backend


def rotated(query: Tensor, key: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """Queries and keys after the model's rotary embedding, which comes with the models that have one."""
    if rotation is None:
        return query, key
    return rotation.apply(query), rotation.apply(key)


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store the keys and values of a step's tokens in the cache, in place.

    key, value    [num_tokens, num_kv_heads, head_dim]
    kv_cache      [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous
    slot_mapping  [num_tokens] int64; -1 marks a padding row, which is skipped; no slot twice

    On a GPU the host waits here for the number of padding rows; a kernel decides per row and needs no answer.
    """
    key_slots, value_slots = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()  # [num_slots, num_kv_heads, head_dim]
    real = slot_mapping != PADDING_SLOT
    slots = slot_mapping[real]
    key_slots[slots] = key[real]
    value_slots[slots] = value[real]


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Attention over the cache: decodes of similar length in one call, each prefill in one call.

    Arguments as in `AttentionBackend`. Padding rows of the query come out as zeros.
    """
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()  # [num_slots, num_kv_heads, head_dim]
    plan = gather_plan(metadata, kv_cache.shape[2], window)
    output = torch.zeros_like(query)
    for decodes in plan.decodes:
        output[decodes.rows] = _decode(query[decodes.rows], keys, values, decodes, scale)
    for prefill in plan.prefills:
        output[prefill.start : prefill.end] = attend_prefill(
            query[prefill.start : prefill.end], keys, values, prefill, scale
        )
    return output


torch_attention = write_then_attend(write_kv, paged_attention_torch)


# Invariant: the query heads that share a key/value head lie side by side, so they can take the place of a query length:
# all of them see the same keys, and no key or value is copied per head.
def _decode(query: Tensor, keys: Tensor, values: Tensor, decodes: DecodeGather, scale: float) -> Tensor:
    num_decodes, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    padded = (num_decodes, -1, num_kv_heads, head_dim)
    k = keys.index_select(0, decodes.slots).view(padded).transpose(1, 2)  # [decodes, kv_heads, context, head_dim]
    v = values.index_select(0, decodes.slots).view(padded).transpose(1, 2)
    q = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=decodes.mask, scale=scale).reshape(query.shape)


def attend_prefill(query: Tensor, keys: Tensor, values: Tensor, prefill: PrefillGather, scale: float) -> Tensor:
    """One request's query rows [query_len, num_heads, head_dim] over its gathered keys; keys, values [num_slots,
    num_kv_heads, head_dim]."""
    num_kv_heads = keys.shape[1]
    group = query.shape[1] // num_kv_heads
    k = keys.index_select(0, prefill.slots).transpose(0, 1).unsqueeze(1)  # [kv_heads, 1, context, head_dim]
    v = values.index_select(0, prefill.slots).transpose(0, 1).unsqueeze(1)
    q = query.transpose(0, 1).unflatten(0, (num_kv_heads, group))  # [kv_heads, group, query_len, head_dim]
    out = F.scaled_dot_product_attention(
        q,
        k.expand(-1, group, -1, -1),  # a view: every head of the group reads the same memory
        v.expand(-1, group, -1, -1),
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
    )
    return out.flatten(0, 1).transpose(0, 1)


# Which slots are read


@dataclass(frozen=True)
class DecodeGather:
    """Some requests with one query token, padded to the longest of their contexts."""

    rows: Tensor  # [num_decodes] int64: their rows in the query
    slots: Tensor  # [num_decodes * max_context] int64: which cache slot each padded position reads
    mask: Tensor  # [num_decodes, 1, 1, max_context] bool: True where the position is real


@dataclass(frozen=True)
class PrefillGather:
    """One request with several query tokens: a prompt, or a chunk of one."""

    start: int  # its query rows are start..end-1
    end: int
    slots: Tensor  # [visible] int64: from the first position that any of these tokens sees to the last
    mask: Tensor | None  # [end - start, visible] bool; None: nothing came before, plain causal attention


@dataclass(frozen=True)
class GatherPlan:
    """Which cache slots a batch reads, and what is masked."""

    decodes: list[DecodeGather]
    prefills: list[PrefillGather]


def gather_plan(metadata: AttentionMetadata, block_size: int, window: int | None = None) -> GatherPlan:
    """The plan for this batch and this sliding window; the first layer computes it, the others reuse it."""
    key = ("torch", block_size, window)
    if key not in metadata.plans:
        metadata.plans[key] = _make_plan(metadata, block_size, window)
    plan: GatherPlan = metadata.plans[key]
    return plan


def _make_plan(metadata: AttentionMetadata, block_size: int, window: int | None) -> GatherPlan:
    query_lens = [end - start for start, end in pairwise(metadata.query_start_loc_cpu)]
    decodes = [request for request, query_len in enumerate(query_lens) if query_len == 1]
    prefills = [request for request, query_len in enumerate(query_lens) if query_len > 1]
    # A GPU has the memory bandwidth for one large group, and pays for each launch.
    on_cpu = metadata.block_table.device.type == "cpu"
    limit = CPU_GROUP_POSITIONS if on_cpu else len(decodes) * metadata.max_seq_len
    visible = [length if window is None else min(length, window) for length in metadata.seq_lens_cpu]
    groups = group_by_length(decodes, visible, limit)
    return GatherPlan(
        [_plan_decodes(metadata, group, visible, block_size) for group in groups],
        [plan_prefill(metadata, request, window, block_size) for request in prefills],
    )


def group_by_length(requests: list[int], seq_lens: list[int], max_positions: int) -> list[list[int]]:
    """Put requests of similar length together, so that little is padded, and at most `max_positions` padded positions
    into a group; a longer request is a group of its own."""
    groups: list[list[int]] = []
    for request in sorted(requests, key=lambda r: seq_lens[r], reverse=True):
        if groups and (len(groups[-1]) + 1) * seq_lens[groups[-1][0]] <= max_positions:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


# Invariant: every padded position reads the last token of its own request. A masked score gets weight 0, but 0 times
# what another request wrote, or nobody did, may be NaN, so even masked positions must read numbers that are the request's own.
def _plan_decodes(
    metadata: AttentionMetadata, requests: list[int], visible: list[int], block_size: int
) -> DecodeGather:
    """`requests` begins with the one that sees most. Request r sees its last `visible[r]` positions."""
    device = metadata.block_table.device
    chosen = torch.tensor(requests, device=device)  # [num_decodes]
    rows = torch.tensor([metadata.query_start_loc_cpu[r] for r in requests], device=device)
    lengths = torch.tensor([visible[r] for r in requests], device=device)[:, None]
    first = torch.tensor([metadata.seq_lens_cpu[r] - visible[r] for r in requests], device=device)[:, None]
    offsets = torch.arange(visible[requests[0]], device=device)  # [max_context]
    own = first + torch.minimum(offsets, lengths - 1)  # [num_decodes, max_context] positions
    blocks = metadata.block_table[chosen].long().gather(1, own // block_size)
    slots = blocks * block_size + own % block_size
    return DecodeGather(rows, slots.flatten(), (offsets < lengths)[:, None, None, :])


def plan_prefill(metadata: AttentionMetadata, request: int, window: int | None, block_size: int) -> PrefillGather:
    """Which slots one request with several query tokens reads, and what is masked."""
    device = metadata.block_table.device
    start, end = metadata.query_start_loc_cpu[request], metadata.query_start_loc_cpu[request + 1]
    query_len, context = end - start, metadata.seq_lens_cpu[request]
    window = context if window is None else window
    first_visible = max(0, context - query_len + 1 - window)  # of the first query token
    positions = torch.arange(first_visible, context, device=device)
    slots = metadata.block_table[request].long()[positions // block_size] * block_size + positions % block_size
    if query_len == context <= window:
        return PrefillGather(start, end, slots, None)
    last_visible = torch.arange(context - query_len, context, device=device)[:, None]  # of each query token
    mask = (positions <= last_visible) & (positions > last_visible - window)
    return PrefillGather(start, end, slots, mask)
