"""What comes between a model's matrix products: norms with the residual added first, and activations (vLLM:
model_executor/layers/layernorm.py and activation.py).

A block of a transformer adds its result to the residual stream, and the next norm reads the sum. A backend may do both in one
pass over memory, and may overwrite the residual. Here is plain torch; Triton's are in triton_kernels/layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.attention import load


@dataclass(frozen=True)
class LayerKernels:
    """The functions of one backend; all keep shape and dtype.

    layer_norm    (x, residual or None, weight, bias, eps) -> (LayerNorm of x + residual, the sum); Ba et al. 2016
    rms_norm      (x, residual or None, weight, eps) -> the same with RMSNorm; Zhang and Sennrich 2019
    gelu          in the tanh approximation, which GPT-2 was trained with; Hendrycks and Gimpel 2016
    silu_and_mul  (gate, up) -> silu(gate) * up, the middle of SwiGLU; Shazeer 2020
    """

    layer_norm: Callable[[Tensor, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    gelu: Callable[[Tensor], Tensor]
    silu_and_mul: Callable[[Tensor, Tensor], Tensor]


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(LayerNorm of the sum, the sum) of x [..., size] and the residual; without a residual, of x alone."""
    total = x if residual is None else x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum, the sum): each row is divided by its root mean square, then scaled by weight [size].

    The mean is taken in float32: the squares of a float16 row can be larger than any float16.
    """
    total = x if residual is None else x + residual
    x32 = total.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight, total


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, any shape."""
    return F.silu(gate) * up


TORCH = LayerKernels(layer_norm, rms_norm, partial(F.gelu, approximate="tanh"), silu_and_mul)
OTHERS = {
    "native": "stage04_kernels.backends.native.layers:LAYER_KERNELS",
    "triton": "stage04_kernels.triton_kernels.backend:LAYER_KERNELS",
    "triton-interpret": "stage04_kernels.triton_kernels.interpreted:LAYER_KERNELS",
}
"""Attention backends that bring their own; every other one uses torch's."""


MORE_ACTIVATIONS = "stage04_kernels.features.activations.names:ACTIVATIONS"  # than GPT-2's own


def activation(name: str, backend: str) -> Callable[[Tensor], Tensor]:
    """The activation that a checkpoint names: GPT-2's own of this backend, any other one in torch."""
    own = name in ("gelu_new", "gelu_pytorch_tanh")  # two ways to compute one formula
    return layer_kernels(backend).gelu if own else load(load(MORE_ACTIVATIONS)[name])


def layer_kernels(backend: str) -> LayerKernels:
    """The norms and activations that go with an attention backend."""
    found: LayerKernels = load(OTHERS[backend]) if backend in OTHERS else TORCH
    return found
