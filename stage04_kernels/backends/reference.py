"""The oracle: paged attention and the KV write, slow and obvious. vLLM has similar ones in its tests.

One request, one query token, one head at a time, in float32. Every other backend is checked against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import PADDING_SLOT, write_then_attend


def gather_context(cache: Tensor, block_ids: list[int], context: int) -> Tensor:
    """Lay the blocks of one request side by side: cache [num_blocks, block_size, num_kv_heads, head_dim] ->
    [context, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    num_blocks = -(-context // block_size)  # rounded up
    return torch.cat([cache[block] for block in block_ids[:num_blocks]])[:context]


def paged_attention_reference(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """The slow twin of `paged_attention_torch`. Arguments as in `AttentionBackend`."""
    output = torch.zeros_like(query)
    heads_per_kv_head = query.shape[1] // kv_cache.shape[3]
    for request, context in enumerate(metadata.seq_lens_cpu):
        start, end = metadata.query_start_loc_cpu[request : request + 2]
        if start == end:
            continue
        block_ids = metadata.block_table[request].tolist()
        keys, values = (gather_context(cache.float(), block_ids, context) for cache in kv_cache)
        for token in range(start, end):
            visible = context - (end - token) + 1
            seen = slice(0 if window is None else max(0, visible - window), visible)
            for head in range(query.shape[1]):
                kv_head = head // heads_per_kv_head
                scores = keys[seen, kv_head] @ query[token, head].float() * scale  # [positions seen]
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                output[token, head] = (weights @ values[seen, kv_head]).to(query.dtype)
    return output


def write_kv_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """The slow twin of `write_kv`: one token at a time."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == PADDING_SLOT:
            continue
        block, offset = divmod(slot, block_size)
        kv_cache[0, block, offset] = key[token]
        kv_cache[1, block, offset] = value[token]


reference_attention = write_then_attend(write_kv_reference, paged_attention_reference)
