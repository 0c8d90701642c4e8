"""RMSNorm and LayerNorm with the residual added before, fast and slow (vLLM: model_executor/layers/layernorm.py).

A block of a transformer adds its result to the residual stream, and the next norm reads the sum: one pass over memory when both are
done together. Sources: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer Normalization".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backend_names import is_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x [..., size] by its root mean square, then scale by weight [size]. Returns x's shape and dtype.

    The mean is taken in float32: the squares of a float16 row can be larger than any float16.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of the sum, the sum) of x [..., size] and the residual; no residual: of x alone. May overwrite the residual."""
    if is_triton(backend, x.device.type):
        from stage04_kernels.triton_kernels.layers import rms_norm_triton

        return rms_norm_triton(x, weight, eps, residual), x if residual is None else residual
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of the sum, the sum) of x [..., size] and the residual; no residual: of x alone. May overwrite the residual."""
    if is_triton(backend, x.device.type):
        from stage04_kernels.triton_kernels.layers import layer_norm_triton

        return layer_norm_triton(x, weight, bias, eps, residual), x if residual is None else residual
    total = x if residual is None else x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm, one row, one number at a time."""
    output = torch.empty_like(x)
    rows, out_rows = x.reshape(-1, x.shape[-1]).tolist(), output.view(-1, x.shape[-1])
    for index, row in enumerate(rows):
        mean = math.fsum(row) / len(row)
        scale = 1.0 / math.sqrt(math.fsum((value - mean) ** 2 for value in row) / len(row) + eps)
        normed = [(value - mean) * scale * w + b for value, w, b in zip(row, weight.tolist(), bias.tolist())]
        out_rows[index] = torch.tensor(normed)
    return output


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One row, one number at a time."""
    output = torch.empty_like(x)
    rows, out_rows, weights = x.reshape(-1, x.shape[-1]).tolist(), output.view(-1, x.shape[-1]), weight.tolist()
    for index, row in enumerate(rows):
        scale = 1.0 / math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        out_rows[index] = torch.tensor([value * scale * w for value, w in zip(row, weights)])
    return output
