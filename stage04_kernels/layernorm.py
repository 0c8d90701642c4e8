"""RMSNorm, fast and slow (vLLM: RMSNorm in model_executor/layers/layernorm.py).

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row of x [..., size] by its root mean square, then scale by weight [size]. Returns x's shape and dtype.

    The mean is taken in float32: the squares of a float16 row can be larger than any float16.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One row, one number at a time."""
    output = torch.empty_like(x)
    rows, out_rows, weights = x.reshape(-1, x.shape[-1]).tolist(), output.view(-1, x.shape[-1]), weight.tolist()
    for index, row in enumerate(rows):
        scale = 1.0 / math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        out_rows[index] = torch.tensor([value * scale * w for value, w in zip(row, weights)])
    return output
