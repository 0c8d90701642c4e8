"""Attention backends by name, and what they must know about a batch (vLLM: the backend selector in
v1/attention/selector.py; FlashAttentionMetadata in v1/attention/backends/flash_attn.py).

A model names no backend. It asks `get_backend` once and calls what it gets in every layer. A new implementation is one more
row of BACKENDS, or a user's own `module:function`. This file imports no torch, so that a command line can check names.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = {
    # plain torch operations, on every device that torch knows
    "torch": "stage04_kernels.paged_attention:torch_attention",
    # compiled for the CPU at hand: reads each block in place, and a row's bits do not depend on the batch
    "native": "stage04_kernels.backends.native.attention:native_attention",
    # the Triton kernels, on a GPU
    "triton": "stage04_kernels.triton_kernels.backend:triton_attention",
    # the same kernels, number by number, on any machine: slow, for learning and testing
    "triton-interpret": "stage04_kernels.triton_kernels.interpreted:triton_attention",
    # a fixed order of arithmetic for each token, whatever else is in the batch
    "batch_invariant": "stage04_kernels.backends.batch_invariant:batch_invariant_attention",
    # the oracle: slow, for tests and debugging
    "reference": "stage04_kernels.backends.reference:reference_attention",
}
"""Name -> where the function is. Nothing is imported before it is chosen."""
PROBLEMS = {"native": "stage04_kernels.backends.native.library:problem"}  # name -> says why it cannot run here


@dataclass
class AttentionMetadata:
    """The batch of one step: which query rows belong to which request, and where its keys and values lie.

    Query rows `query_start_loc[r]` to `query_start_loc[r + 1] - 1` are the tokens of request r in this step. Its context
    is `seq_lens[r]` tokens long, these included. Position p of the context lies in block `block_table[r, p // block_size]`
    at offset `p % block_size`; entries after the last needed block are never read. Rows after the last request are padding.

    The two `_cpu` lists repeat the tensors on the host, so that host code never waits for a device to answer. All layers of
    a step share the metadata; what a backend derives from it alone is computed once and kept in `plans`.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32
    block_table: Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64: where each row's key and value go; -1 = padding
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]
    max_query_len: int
    max_seq_len: int
    plans: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


class Rotation(Protocol):
    """The rotary embedding of a step's tokens, for models that have one: cos and sin, which kernels take apart."""

    def __iter__(self) -> Iterator[Tensor]: ...

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [num_tokens, num_heads, head_dim]."""


class AttentionBackend(Protocol):
    """Stores this step's keys and values in the cache, then lets every query token attend to its context."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float,
        window: int | None = None, rotation: Rotation | None = None, /,
    ) -> Tensor:  # fmt: skip
        """
        query       [num_tokens, num_heads, head_dim]
        key, value  [num_tokens, num_kv_heads, head_dim]; num_heads is a multiple of num_kv_heads
        kv_cache    [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous; changed in place
        scale       factor on the scores, usually head_dim ** -0.5
        window      sliding window: how many positions a token sees at most, its own included; None = all
        rotation    cos and sin of the rotary embedding (rope_cos_sin) for queries and keys; None = the model has none
        Returns     [num_tokens, num_heads, head_dim]; causal: token i of q, with a context of s, sees positions 0..s-q+i,
                    and of these the last `window`. Padding rows come out as zeros.
        """


def resolve_backend(name: str, device: str = "cpu") -> str:
    """One of the names, or a user's `module:function`; "auto" becomes the fastest for the device (cpu or cuda).

    Raises ValueError for an unknown name, for a backend whose files were removed, and for one that cannot run on this machine.
    """
    if name == "auto":
        return choose_backend(device)[0]
    if name not in BACKENDS:
        if ":" not in name:
            known = ", ".join(BACKENDS)
            raise ValueError(
                f"unknown attention backend {name!r}; known: auto, {known}, or module:function of your own"
            )
    elif problem := _problem(name):
        raise ValueError(f"the attention backend {name} {problem}")
    return name


def choose_backend(device: str) -> tuple[str, str]:
    """What "auto" means: (the fastest backend for the device, what decided). On a CPU the first call may compile."""
    if device == "cuda":
        return "triton", "device is cuda"
    problem = _problem("native")
    return ("torch", f"native {problem}") if problem else ("native", f"device is {device}")


def _problem(name: str) -> str | None:
    module = BACKENDS[name].partition(":")[0]
    with suppress(ModuleNotFoundError):  # not even its folder is there
        if find_spec(module) is not None:
            problem = load(PROBLEMS[name])() if name in PROBLEMS else None
            return problem and f"cannot run: {problem}"
    return f"is not installed: {module} is missing"


def load(name: str) -> Any:
    """The object that `module:attribute` names. Raises ImportError or AttributeError if there is none."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def get_backend(name: str) -> AttentionBackend:
    """The attention function of a backend. Raises ValueError, ImportError or AttributeError if it cannot be loaded."""
    name = resolve_backend(name)
    backend: AttentionBackend = load(BACKENDS.get(name, name))
    if not callable(backend):
        raise ValueError(f"{name} is not a function")
    return backend


def check_backend(name: str, device: str) -> None:
    """Load the backend and check that it can run on the device. Raises ValueError in one line."""
    import torch

    resolved = resolve_backend(name, device)
    if resolved == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("the attention backend triton needs a GPU; triton-interpret runs the same kernels without one")
    try:
        get_backend(resolved)
    except (ImportError, AttributeError) as error:
        hint = "; pip install --editable '.[kernels]' adds it" if getattr(error, "name", None) == "triton" else ""
        raise ValueError(f"the attention backend {resolved} cannot be loaded: {error}{hint}") from error
