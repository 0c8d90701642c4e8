"""Linear layers with int8 weights: W is kept as scale * Q, with one scale for each output (vLLM: int8_per_channel_weight_only;
Dettmers et al. 2022, "LLM.int8()", calls it vector-wise, and says which activations make it hard).

`native_int8` reads a quarter of float32's bytes, and a decode step is bound by reading. `TorchInt8Linear` is its slow twin.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends.native.linear import NativeLinear, input_bits

MOST = 127
ROWS = 512  # quantized at a time, so that no matrix is held in float32 several times


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out_features, in_features] -> (int8 of the same shape, scale float32 [out_features]), weight = int8 * scale.

    Symmetric: the largest magnitude of an output becomes 127, the others are rounded to nearest, ties to even. So no weight is
    wrong by more than half of its output's scale. An output of zeros has scale 0.
    """
    scale = torch.empty(len(weight), device=weight.device)
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, len(weight), ROWS):
        rows = weight[start : start + ROWS].float()
        part = scale[start : start + ROWS] = rows.abs().amax(dim=1) / MOST
        divisor = torch.where(part > 0, part, 1.0)[:, None]
        quantized[start : start + ROWS] = (rows / divisor).round_().clamp_(-MOST, MOST)
    return quantized, scale


class TorchInt8Linear:
    """Widens the weights and multiplies in float32, each time anew. Runs on any device; saves memory, and no time.
    Arguments as in `backends.linear.Pack`; with `scale` [out_features] the weight is int8 already, and is what it was before times the scale."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, scale: Tensor | None = None
    ) -> None:
        self.weight, self.scale = quantize(weight) if scale is None else (weight, scale)
        self.bias, self.activation = bias, activation
        self.nbytes = self.weight.nbytes + self.scale.nbytes

    def matrix(self) -> Tensor:
        """float32 [out_features, in_features]"""
        return self.weight.float() * self.scale[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in x's number format."""
        y = F.linear(x.float(), self.weight.float()) * self.scale
        y = y if self.bias is None else y + self.bias.float()
        return (y if self.activation is None else F.gelu(y, approximate="tanh")).to(x.dtype)


def native_int8(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> NativeLinear:
    """Compiled; inputs become integers of as many bits as this processor multiplies fastest. Raises NativeError."""
    return _native(weight, bias, activation, input_bits())


def native_int8_weight_only(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> NativeLinear:
    """Compiled; inputs become integers of 16 bits, which lose nothing that matters. Raises NativeError."""
    return _native(weight, bias, activation, 16)


def native_int8_with_8_bits(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> NativeLinear:
    """As `native_int8` where the processor multiplies 8 bits fastest, on any processor. Raises NativeError."""
    return _native(weight, bias, activation, 8)


def _native(weight: Tensor, bias: Tensor | None, activation: str | None, bits: int) -> NativeLinear:
    quantized, scale = quantize(weight)
    return NativeLinear(quantized, bias, activation, scale, bits)
