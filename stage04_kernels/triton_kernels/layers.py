"""The Triton twins of stage04_kernels/layers.py: norms with the residual added, and activations (vLLM:
csrc/layernorm_kernels.cu, fused_add_rms_norm; csrc/activation_kernels.cu).

All of these are memory-bound: a kernel reads each number once and writes each result once, where separate operations would
write and read in between. Norms take one program per row, activations a tile of the flat tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage04_kernels.layers import LayerKernels
from stage04_kernels.triton_kernels.tiles import INTERPRETED, next_power_of_2

ACTIVATION_TILE = 65536 if INTERPRETED else 1024


@triton.jit
def _norm(
    x_ptr,  # [num_rows, SIZE]
    residual_ptr,  # [num_rows, SIZE]; read, and overwritten with x + residual
    weight_ptr,  # [SIZE]
    bias_ptr,
    out_ptr,  # [num_rows, SIZE]
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CENTRE: tl.constexpr,  # LayerNorm subtracts the mean and has a bias; RMSNorm does neither
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, PADDED_SIZE)
    real = at < SIZE
    x = tl.load(x_ptr + row + at, mask=real, other=0.0)
    dtype = x_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row + at, mask=real, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + residual).to(dtype)  # rounded as it is stored: the next layer reads the same number
        tl.store(residual_ptr + row + at, x, mask=real)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=real, other=0.0).to(tl.float32)
    if CENTRE:
        x = tl.where(real, x - tl.sum(x, 0) / SIZE, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    if CENTRE:
        normed = normed * weight + tl.load(bias_ptr + at, mask=real, other=0.0).to(tl.float32)
    else:
        normed = normed.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row + at, normed.to(dtype), mask=real)


def _launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        padded = next_power_of_2(size)
        _norm[(x.numel() // size,)](
            x, residual, weight, bias, out, eps, SIZE=size, PADDED_SIZE=padded, HAS_RESIDUAL=residual is not None,
            CENTRE=bias is not None, num_warps=min(16, max(1, padded // 512)),
        )  # fmt: skip
    return out, x if residual is None else residual


def rms_norm_triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + residual, the sum). The sum is stored in the residual (contiguous)."""
    return _launch_norm(x, residual, weight, None, eps)


def layer_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(LayerNorm of x + residual, the sum). The sum is stored in the residual (contiguous)."""
    return _launch_norm(x, residual, weight, bias, eps)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _gelu(x_ptr, out_ptr, num_elements, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    real = at < num_elements
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    tl.store(out_ptr + at, (0.5 * x * (1.0 + _tanh(inner))).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _silu_and_mul(gate_ptr, up_ptr, out_ptr, num_elements, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    real = at < num_elements
    gate = tl.load(gate_ptr + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=real, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at, (activated * up).to(out_ptr.dtype.element_ty), mask=real)


def gelu_triton(x: Tensor) -> Tensor:
    """GELU in the tanh approximation, any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _gelu[(triton.cdiv(x.numel(), ACTIVATION_TILE),)](x, out, x.numel(), TILE=ACTIVATION_TILE, num_warps=4)
    return out


def silu_and_mul_triton(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, any shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), ACTIVATION_TILE),)
        _silu_and_mul[grid](gate, up, out, gate.numel(), TILE=ACTIVATION_TILE, num_warps=4)
    return out


LAYER_KERNELS = LayerKernels(layer_norm_triton, rms_norm_triton, gelu_triton, silu_and_mul_triton)
