"""Paged attention in torch, twice: slow and obvious, and fast (vLLM: flash_attn_varlen_func with a block table).

Both read keys and values from the paged cache, so `write_kv` comes first. Query token i of a request with q tokens in
this step and a context of s tokens sees the keys at positions 0 to s - q + i, with a sliding window (Beltagy et al. 2020) of
w only the last w of these. Several query heads may share one key/value head
(grouped-query attention, Ainslie et al. 2023): head h reads key/value head h // (num_heads // num_kv_heads).
Source of paging: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stage04_kernels.attention_metadata import AttentionMetadata, DecodeGather, PrefillGather


def gather_context(cache: Tensor, block_ids: list[int], context: int) -> Tensor:
    """Lay the blocks of one request side by side: cache [num_blocks, block_size, num_kv_heads, head_dim] ->
    [context, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    num_blocks = -(-context // block_size)  # rounded up
    return torch.cat([cache[block] for block in block_ids[:num_blocks]])[:context]


def paged_attention_reference(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """The oracle: one request, one query token, one head at a time, in float32. Arguments as in `attention`."""
    return attention_reference(query, kv_cache, metadata, scale, window)[0]


def attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The oracle with everything that `paged_attention_triton` knows: (output, log-sum-exp of each row's scores, float32
    [num_tokens, num_heads])."""
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf)
    heads_per_kv_head = query.shape[1] // kv_cache.shape[3]
    for request, context in enumerate(metadata.seq_lens_cpu):
        start, end = metadata.query_start_loc_cpu[request : request + 2]
        if start == end:
            continue
        block_ids = metadata.block_table[request].tolist()
        keys = gather_context(kv_cache[0].float(), block_ids, context) * k_scale
        values = gather_context(kv_cache[1].float(), block_ids, context) * v_scale
        positions = torch.arange(context)
        for token in range(start, end):
            visible = context - (end - token) + 1
            seen = slice(0 if window is None else max(0, visible - window), visible)
            for head in range(query.shape[1]):
                kv_head = head // heads_per_kv_head
                scores = keys[seen, kv_head] @ query[token, head].float() * scale  # [positions seen]
                if soft_cap > 0.0:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[head] * (positions[seen] - (visible - 1))
                weights = torch.exp(scores - scores.max())
                lse[token, head] = scores.max() + weights.sum().log()
                weights = weights / weights.sum()
                output[token, head] = (weights @ values[seen, kv_head]).to(query.dtype)
    return output, lse


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """The fast path: decodes of similar length in one call, each prefill in one call. Arguments as in `attention`.

    Padding rows of the query come out as zeros.
    """
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()  # [num_slots, num_kv_heads, head_dim]
    plan = metadata.gather_plan(kv_cache.shape[2], window)
    output = torch.zeros_like(query)
    for decodes in plan.decodes:
        output[decodes.rows] = _decode(query[decodes.rows], keys, values, decodes, scale)
    for prefill in plan.prefills:
        output[prefill.start : prefill.end] = attend_prefill(
            query[prefill.start : prefill.end], keys, values, prefill, scale
        )
    return output


# Invariant: the query heads that share a key/value head stand side by side, so they can take the place of a query length:
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
    """One request's query rows [query_len, num_heads, head_dim] over its gathered keys; keys, values [num_slots, num_kv_heads, head_dim]."""
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
