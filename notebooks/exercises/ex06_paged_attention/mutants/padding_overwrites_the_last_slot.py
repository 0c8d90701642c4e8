"""Misconception: a slot of -1 is no slot, so nothing is stored. In Python it is the last one."""

from __future__ import annotations

from torch import Tensor

from stage04_kernels.paged_attention import paged_attention_torch, torch_attention

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "slot 5 (block 2, offset 1) as it was"


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    keys, values = kv_cache.view(2, -1, *kv_cache.shape[3:]).unbind()
    keys[slot_mapping], values[slot_mapping] = key, value
