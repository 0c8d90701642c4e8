"""Linear layers with int4 weights: W = scale * (code - zero), with a scale and a zero for each output and group of inputs (vLLM: the WNA16
kernels behind gptq, awq and compressed-tensors; llama.cpp's Q4_1 is alike).

`NativeInt4Linear` reads an eighth of float32's bytes, and a decode step is bound by reading. `TorchInt4Linear` is its slow twin, and that of the kernel in
`triton_kernels/int4_linear.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends.linear import int4_group
from stage04_kernels.backends.native.library import function, load_library
from stage04_kernels.backends.native.linear import ACTIVATIONS, SUFFIXES
from stage04_kernels.backends.native.memory import packed_tensor

MOST = 15
ROWS = 512  # quantized at a time, so that no matrix is held in float32 several times


@dataclass(frozen=True)
class Int4Weights:
    """A matrix [out_features, in_features] of codes from 0 to 15."""

    codes: Tensor  # uint8 [out_features, in_features], one code to a byte; packed by what multiplies
    scale: Tensor  # float32 [out_features, groups]
    zero: Tensor  # uint8 [out_features, groups]
    group: int  # neighbours that share a scale; the last group may have fewer
    order: Tensor | None = None  # int32 [in_features]: the input that each column of `codes` multiplies; None: its own


def quantize(weight: Tensor) -> Int4Weights:
    """weight [out_features, in_features] -> its codes.

    Asymmetric: the least number of a group becomes 0 and the largest 15, with 0.0 between them or at an end; others are rounded to nearest, ties
    to even. So no weight is wrong by more than a scale, and most by half of it. A group of zeros has scale 0. (Symmetric codes, and a search for the
    scale with the least squared error, were measured too: no better, see the README of the room `quantization`.)
    """
    outputs, inputs = weight.shape
    group = int4_group(inputs)
    scale = torch.empty(outputs, inputs // group, device=weight.device)
    zero = torch.empty(scale.shape, dtype=torch.uint8, device=weight.device)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, outputs, ROWS):
        rows = weight[start : start + ROWS].float().unflatten(1, (-1, group))
        low, high = rows.amin(-1).clamp_(max=0), rows.amax(-1).clamp_(min=0)
        part = scale[start : start + ROWS] = high / MOST - low / MOST
        divisor = torch.where(part > 0, part, 1.0)
        zeros = (-low / divisor).round_().clamp_(0, MOST)
        zero[start : start + ROWS] = zeros.to(torch.uint8)
        whole = (rows / divisor[..., None]).round_().add_(zeros[..., None]).clamp_(0, MOST)
        codes[start : start + ROWS] = whole.flatten(1).to(torch.uint8)
    return Int4Weights(codes, scale, zero, group)


class TorchInt4Linear:
    """Widens the weights and multiplies in float32, each time anew. Runs on any device; saves memory, and no time."""

    def __init__(self, weights: Int4Weights, bias: Tensor | None = None, activation: str | None = None) -> None:
        codes = F.pad(weights.codes, (0, weights.codes.shape[1] % 2))
        self.packed = codes[:, ::2] | codes[:, 1::2] << 4  # uint8 [out_features, in_features / 2]
        self.scale, self.zero, self.group = weights.scale, weights.zero, weights.group
        self.order = None if weights.order is None else weights.order.long()
        self.inputs, self.bias, self.activation = weights.codes.shape[1], bias, activation
        self.nbytes = self.packed.nbytes + self.scale.nbytes + self.zero.nbytes

    def matrix(self) -> Tensor:
        """float32 [out_features, in_features], columns in the order of the codes"""
        codes = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)[:, : self.inputs].float()
        of = torch.arange(self.inputs, device=codes.device) // self.group
        return codes.sub_(self.zero.float()[:, of]).mul_(self.scale[:, of])

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in x's number format."""
        y = F.linear((x if self.order is None else x[..., self.order]).float(), self.matrix())
        y = y if self.bias is None else y + self.bias.float()
        return (y if self.activation is None else F.gelu(y, approximate="tanh")).to(x.dtype)


class NativeInt4Linear:
    """The same, compiled, for x in float32 or bfloat16 on a CPU. Inputs become integers of 8 bits, in groups of at most 64; sums within a group are
    exact. A row's result does not depend, in any bit, on the other rows. Raises NativeError where nothing can be compiled."""

    def __init__(self, weights: Int4Weights, bias: Tensor | None = None, activation: str | None = None) -> None:
        library, threads = load_library(), torch.get_num_threads()
        self.out_features, self.in_features = weights.codes.shape
        self.group = weights.group
        size, codes = (self.in_features, self.out_features, self.group), weights.codes.contiguous()
        library.int4_bytes.argtypes, library.int4_bytes.restype = [ctypes.c_long] * 3, ctypes.c_long
        self.packed = packed_tensor(library.int4_bytes(*size), torch.uint8)
        function("pack_int4", "ppllli")(codes.data_ptr(), self.packed.data_ptr(), *size, threads)
        self.scale, self.zero = _in_panels(weights.scale.float()), _in_panels(weights.zero)
        self.order = None if weights.order is None else weights.order.to(torch.int32).contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.nbytes = self.packed.nbytes + self.scale.nbytes + self.zero.nbytes
        order, offset = (None if kept is None else kept.data_ptr() for kept in (self.order, self.bias))
        places = (self.packed.data_ptr(), self.scale.data_ptr(), self.zero.data_ptr(), order, offset)
        self.constants = (*places, ACTIVATIONS[activation])
        letters = "ppppppiplllli"
        self.functions = {dtype: function(f"linear_int4{suffix}", letters) for dtype, suffix in SUFFIXES.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in x's number format."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        self.functions[x.dtype](
            x.data_ptr(), *self.constants, y.data_ptr(), x.numel() // self.in_features, self.in_features,
            self.out_features, self.group, torch.get_num_threads(),
        )  # fmt: skip
        return y


def _in_panels(values: Tensor) -> Tensor:
    """[out_features, groups] -> [panels, groups, panel_width], filled up with zeros."""
    width = load_library().panel_width()
    padded = F.pad(values, (0, 0, 0, -len(values) % width))
    return padded.unflatten(0, (-1, width)).transpose(1, 2).contiguous()


def codes_of(weight: Tensor | Int4Weights) -> Int4Weights:
    """The codes of a weight, which may have been quantized elsewhere."""
    return weight if isinstance(weight, Int4Weights) else quantize(weight)


def torch_int4(
    weight: Tensor | Int4Weights, bias: Tensor | None = None, activation: str | None = None
) -> TorchInt4Linear:
    """Any weight, packed, and quantized unless it is already. Arguments as in `backends.linear.Pack`."""
    return TorchInt4Linear(codes_of(weight), bias, activation)


def native_int4(
    weight: Tensor | Int4Weights, bias: Tensor | None = None, activation: str | None = None
) -> NativeInt4Linear:
    """The same, compiled. Raises NativeError."""
    return NativeInt4Linear(codes_of(weight), bias, activation)
