"""Linear layers with fp8 weights: W is kept as scale * Q, where Q are floats of 8 bits with 3 bits of mantissa (vLLM: Fp8OnlineLinearMethod of
model_executor/layers/quantization, whose scale is one for the whole matrix; here each output has its own, which costs nothing and rounds less).

`TorchFp8Linear` is the slow twin of the kernel in `triton_kernels/byte_linear.py`. There is no compiled product for a CPU: none multiplies these numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.backends.int8_linear import TorchInt8Linear

MOST = 448.0  # the largest number of float8_e4m3fn
ROWS = 512  # quantized at a time, so that no matrix is held in float32 several times


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out_features, in_features] -> (float8_e4m3fn of the same shape, scale float32 [out_features]), weight = fp8 * scale.

    The largest magnitude of an output becomes 448, the others are rounded to nearest. So a weight is wrong by a sixteenth of itself at most, or, if it is tiny, by a 2**-10th of
    the scale. An output of zeros has scale 0.
    """
    scale = torch.empty(len(weight), device=weight.device)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS].float()
        part = scale[start : start + ROWS] = rows.abs().amax(dim=1) / MOST
        divisor = torch.where(part > 0, part, 1.0)[:, None]
        quantized[start : start + ROWS] = (rows / divisor).clamp_(-MOST, MOST).to(torch.float8_e4m3fn)
    return quantized, scale


class TorchFp8Linear(TorchInt8Linear):
    """The same for weights of fp8. Arguments as in `backends.linear.Pack`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        codes, scale = quantize(weight)
        super().__init__(codes, bias, activation, scale)
