"""Writing keys and values into the paged KV cache (vLLM: reshape_and_cache_flash in csrc/cache_kernels.cu).

The cache of one layer is one tensor [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values. A slot is a
token's place in it: slot = block_id * block_size + offset in the block.
"""

from __future__ import annotations

from torch import Tensor

PADDING_SLOT = -1


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


def write_kv_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """The slow twin of `write_kv`: one token after the other."""
    block_size = kv_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot == PADDING_SLOT:
            continue
        block, offset = divmod(slot, block_size)
        kv_cache[0, block, offset] = key[token]
        kv_cache[1, block, offset] = value[token]
