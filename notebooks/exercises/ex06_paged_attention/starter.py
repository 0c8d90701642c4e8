"""Paged attention in torch: write keys and values into their slots, then let every query token attend to its context.

`torch_attention`, at the end, is given: it is what the model calls in every layer, and it calls your two functions.
"""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.paged_attention import write_then_attend


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store the keys and values of a step's tokens in the cache, in place.

    key, value    [num_tokens, num_kv_heads, head_dim]
    kv_cache      [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous: kv_cache[0] are the keys, kv_cache[1] the values
    slot_mapping  [num_tokens] int64: the slot of each row, block * block_size + offset; -1 marks a row of padding; no slot comes twice
    """
    raise NotImplementedError


def paged_attention_torch(
    query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Attention of a step's query tokens over the cache.

    query     [num_tokens, num_heads, head_dim]: the new tokens of all requests, one request after the other, then padding
    kv_cache  [2, num_blocks, block_size, num_kv_heads, head_dim]; the new tokens' keys and values are in it already.
              num_heads is a multiple of num_kv_heads
    scale     factor on the scores
    window    how many positions a token sees at most, its own included; None = all

    Of the metadata you need, for request r:
    metadata.query_start_loc_cpu[r], [r + 1]  its first query row, and the one after its last: a list of num_reqs + 1 ints
    metadata.seq_lens_cpu[r]                  the length of its context, these tokens included: a list of num_reqs ints
    metadata.block_table[r]                   its blocks in the order of its positions, [max_blocks] int32; entries behind the last block
                                              that its context needs mean nothing

    Returns [num_tokens, num_heads, head_dim], in the query's number format.
    """
    raise NotImplementedError


torch_attention = write_then_attend(write_kv, paged_attention_torch)
