"""Misconception: new tokens go behind each other from the first one's slot on. At the end of a block that is another request's."""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.paged_attention import paged_attention_torch, torch_attention, write_kv as reference

__all__ = ["paged_attention_torch", "torch_attention", "write_kv"]
REJECTED = "write_kv stores the key and the value of row i"


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    real = int((slot_mapping >= 0).sum())
    first, num_slots = slot_mapping[:1], kv_cache.shape[1] * kv_cache.shape[2]
    if real:
        reference(key[:real], value[:real], kv_cache, (first + torch.arange(real)) % num_slots)
