"""Norms with the residual added in the same pass, and activations, compiled. Statistics are float32.

Tensors that are not all float32, or all bfloat16, on a CPU take torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stage04_kernels.backends.native.library import function
from stage04_kernels.layers import TORCH, LayerKernels


def functions_of(name: str, arguments: str) -> dict[torch.dtype, Callable[..., None]]:
    """A function of native.cpp for each number format that it knows."""
    formats = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return {dtype: function(f"{name}_{suffix}", arguments) for dtype, suffix in formats.items()}


NORM = functions_of("norm", "pppppllfii")
GELU = functions_of("gelu", "ppli")
SILU_AND_MUL = functions_of("silu_and_mul", "pppli")


def _knows(x: Tensor, *others: Tensor) -> bool:
    return x.dtype in NORM and x.is_cpu and all(other.dtype == x.dtype and other.is_cpu for other in others)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm with a bias, RMSNorm without. The sum takes the place of the residual."""
    x = x.contiguous()
    total = x if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    NORM[x.dtype](
        x.data_ptr(), None if residual is None else total.data_ptr(), weight.contiguous().data_ptr(),
        None if bias is None else bias.contiguous().data_ptr(), out.data_ptr(), x.numel() // weight.numel(),
        weight.numel(), eps, bias is not None, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(LayerNorm of the sum, the sum) of x [..., size] and the residual, which is overwritten."""
    if not _knows(x, weight, bias) or (residual is not None and not _knows(x, residual)):
        return TORCH.layer_norm(x, residual, weight, bias, eps)
    return _norm(x, residual, weight, bias, eps)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum, the sum) of x [..., size] and the residual, which is overwritten."""
    if not _knows(x, weight) or (residual is not None and not _knows(x, residual)):
        return TORCH.rms_norm(x, residual, weight, eps)
    return _norm(x, residual, weight, None, eps)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh approximation, any shape."""
    if not _knows(x):
        return TORCH.gelu(x)
    x = x.contiguous()
    out = torch.empty_like(x)
    GELU[x.dtype](x.data_ptr(), out.data_ptr(), x.numel(), torch.get_num_threads())
    return out


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, any shape."""
    if not _knows(gate, up) or gate.shape != up.shape:
        return TORCH.silu_and_mul(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    SILU_AND_MUL[gate.dtype](gate.data_ptr(), up.data_ptr(), out.data_ptr(), out.numel(), torch.get_num_threads())
    return out


LAYER_KERNELS = LayerKernels(layer_norm, rms_norm, gelu, silu_and_mul)
