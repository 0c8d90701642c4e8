"""The one attention entry point that model files call (vLLM: Attention in attention/layer.py and its backend selector).

A model names no backend. A new implementation, such as a Triton kernel, becomes one more row of BACKENDS.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stage04_kernels.attention_metadata import AttentionMetadata
from stage04_kernels.batch_invariant import paged_attention_batch_invariant
from stage04_kernels.kv_cache import write_kv, write_kv_reference
from stage04_kernels.paged_attention import paged_attention_reference, paged_attention_torch

__all__ = ["BACKENDS", "AttentionMetadata", "attention", "resolve_backend"]

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionMetadata, float, int | None], Tensor]


def torch_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    """Plain torch operations; runs on every device that torch knows."""
    write_kv(key, value, kv_cache, metadata.slot_mapping)
    return paged_attention_torch(query, kv_cache, metadata, scale, window)


def reference_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    """The oracle: slow, for tests and for doubt."""
    write_kv_reference(key, value, kv_cache, metadata.slot_mapping)
    return paged_attention_reference(query, kv_cache, metadata, scale, window)


def batch_invariant_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
) -> Tensor:
    """A fixed order of arithmetic for each token, whatever else is in the batch."""
    write_kv(key, value, kv_cache, metadata.slot_mapping)
    return paged_attention_batch_invariant(query, kv_cache, metadata, scale, window)


BACKENDS: dict[str, Backend] = {
    "torch": torch_backend,
    "batch_invariant": batch_invariant_backend,
    "reference": reference_backend,
}
"""Backend name -> what writes the new keys and values and computes the attention."""


def resolve_backend(name: str) -> str:
    """The name of a row of BACKENDS; "auto" becomes the fastest that works everywhere.

    Raises ValueError, with the known names, for an unknown one.
    """
    if name == "auto":
        return "torch"
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return name


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    backend: str = "auto",
    window: int | None = None,
) -> Tensor:
    """Store this step's keys and values in the cache, then let every query token attend to its context.

    query       [num_tokens, num_heads, head_dim]
    key, value  [num_tokens, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads
    kv_cache    [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; changed in place
    scale       factor on the scores, usually head_dim ** -0.5
    window      sliding window: how many positions a token sees at most, its own included; None = all
    Returns     [num_tokens, num_heads, head_dim]; causal: token i of q, with a context of s, sees positions 0..s-q+i, and of
                these the last `window`

    Raises ValueError for an unknown backend.
    """
    return BACKENDS[resolve_backend(backend)](query, key, value, kv_cache, metadata, scale, window)
