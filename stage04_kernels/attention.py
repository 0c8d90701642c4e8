"""The one attention entry point that model files call (vLLM: Attention in attention/layer.py and its backend selector).

A model names no backend. A new implementation becomes one more row of BACKENDS, or a user's own function of the same arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from stage04_kernels.attention_metadata import AttentionMetadata
from stage04_kernels.backend_names import resolve_backend
from stage04_kernels.rope import apply_rope

__all__ = ["BACKENDS", "AttentionMetadata", "attention", "check_backend", "get_backend", "resolve_backend"]

Rotation = tuple[Tensor, Tensor]
"""cos and sin of every token's angles, each float32 [num_tokens, 1, head_dim / 2] (rope_cos_sin)."""

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionMetadata, float, int | None, Rotation | None], Tensor]
"""query, key, value, kv_cache, metadata, scale, window, rotation -> output, as in `attention`."""


def write_then_attend(write: Callable[..., None], attend: Callable[..., Tensor]) -> Backend:
    """A backend of two parts: keys and values go into the cache before any query reads it."""

    def backend(
        query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None, rotation: Rotation | None,
    ) -> Tensor:  # fmt: skip
        if rotation is not None:
            query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
        write(key, value, kv_cache, metadata.slot_mapping)
        return attend(query, kv_cache, metadata, scale, window)

    return backend


def _torch() -> Backend:
    from stage04_kernels.kv_cache import write_kv
    from stage04_kernels.paged_attention import paged_attention_torch

    return write_then_attend(write_kv, paged_attention_torch)


def _cpu() -> Backend:
    from stage04_kernels.backends.cpu_attention import paged_attention_cpu
    from stage04_kernels.kv_cache import write_kv

    return write_then_attend(write_kv, paged_attention_cpu)


def _batch_invariant() -> Backend:
    from stage04_kernels.backends.batch_invariant import paged_attention_batch_invariant
    from stage04_kernels.kv_cache import write_kv

    return write_then_attend(write_kv, paged_attention_batch_invariant)


def _reference() -> Backend:
    from stage04_kernels.kv_cache import write_kv_reference
    from stage04_kernels.paged_attention import paged_attention_reference

    return write_then_attend(write_kv_reference, paged_attention_reference)


def _triton() -> Backend:
    from stage04_kernels.triton_kernels.backend import triton_attention

    return triton_attention


def _triton_interpret() -> Backend:
    # Triton asks the environment when it is imported: its own library consists of kernels too.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("triton-interpret must be chosen before triton is imported: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    return _triton()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "torch": _torch,
    "cpu": _cpu,
    "triton": _triton,
    "triton-interpret": _triton_interpret,
    "batch_invariant": _batch_invariant,
    "reference": _reference,
}
"""Backend name (see ATTENTION_BACKENDS for what each is) -> what loads it. A loaded backend writes the new keys and values and
computes the attention."""


@cache
def _load(name: str) -> Backend:
    return BACKENDS[name]()


def get_backend(name: str) -> Backend:
    """A backend by its resolved name. Raises ValueError, ImportError or AttributeError when it cannot be loaded."""
    if name in BACKENDS:
        return _load(name)
    module, _, function = name.partition(":")
    backend: Backend = getattr(import_module(module), function)
    if not callable(backend):
        raise ValueError(f"{name} is not a function")
    return backend


def check_backend(name: str, device: str) -> None:
    """Load the backend and see that it can run on the device. Raises ValueError in one line."""
    resolved = resolve_backend(name, device)
    if resolved == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("the attention backend triton needs a GPU; triton-interpret runs the same kernels without one")
    try:
        get_backend(resolved)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the attention backend {resolved} cannot be loaded: {error}") from error


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    backend: str = "auto",
    window: int | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Store this step's keys and values in the cache, then let every query token attend to its context.

    query       [num_tokens, num_heads, head_dim]
    key, value  [num_tokens, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads
    kv_cache    [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; changed in place
    scale       factor on the scores, usually head_dim ** -0.5
    window      sliding window: how many positions a token sees at most, its own included; None = all
    rotation    rotary embedding of queries and keys; None = the model has none. A backend may do it while it writes the keys
    Returns     [num_tokens, num_heads, head_dim]; causal: token i of q, with a context of s, sees positions 0..s-q+i, and of
                these the last `window`

    Raises ValueError for an unknown backend.
    """
    name = resolve_backend(backend, query.device.type)
    return get_backend(name)(query, key, value, kv_cache, metadata, scale, window, rotation)
