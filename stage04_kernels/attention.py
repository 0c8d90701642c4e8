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


def write_then_attend(write: Callable[..., None], attend: Callable[..., Tensor]) -> Backend:
    """A backend of two parts: keys and values go into the cache before any query reads it."""

    def backend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        write(key, value, kv_cache, metadata.slot_mapping)
        return attend(query, kv_cache, metadata, scale, window)

    return backend


BACKENDS: dict[str, Backend] = {
    "torch": write_then_attend(write_kv, paged_attention_torch),
    "batch_invariant": write_then_attend(write_kv, paged_attention_batch_invariant),
    "reference": write_then_attend(write_kv_reference, paged_attention_reference),
}
"""Backend name -> what writes the new keys and values and computes the attention.

torch            plain torch operations, on every device that torch knows
batch_invariant  a fixed order of arithmetic for each token, whatever else is in the batch
reference        the oracle: slow, for tests and for doubt
"""


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
