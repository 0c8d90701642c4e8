"""The product of weights of a byte each, int8 or fp8, with a scale for each output (vLLM: kernels/linear/scaled_mm, of which triton is one, and Marlin's weight-only
fp8). The twins are `TorchInt8Linear` and `TorchFp8Linear` of stage04_kernels/backends.

A program takes some rows of x and some outputs, and goes along the inputs: it loads bytes, widens them in registers to the format of x, which holds every one of them exactly, and
multiplies on the matrix unit. A scale belongs to an output, so it waits for the end of the sum.

An fp8 code is taken apart by integer arithmetic: exponent and mantissa lie in a float16 as they do in the byte, only its exponents begin 8 lower. So all chips, Triton's versions and
its interpreter have the same fp8, and the factor of 256 is in the scale already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends import fp8_linear, int8_linear
from stage04_kernels.triton_kernels.tiles import INTERPRETED, next_power_of_2

BLOCK_K = 64  # inputs at a time
FEW_ROWS, MANY_ROWS = 16, 64
OUTPUTS = {FEW_ROWS: 32, MANY_ROWS: 64}  # more programs read the weights of a decode; a prompt reads them less often
FP8_FACTOR = 256.0


@triton.jit
def _widened(code, FP8: tl.constexpr):
    """uint8 codes -> float32: whole numbers, or those of fp8 divided by 256."""
    if FP8:
        bits = code.to(tl.int16)
        return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _byte_linear(
    x_ptr,  # [num_rows, IN]
    code_ptr,  # uint8 [OUT, IN]
    scale_ptr,  # float32 [OUT]
    bias_ptr,  # [OUT]
    y_ptr,  # [num_rows, OUT]
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    FP8: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_row, real_output = row < num_rows, output < OUT
    x_row, code_row = row.to(tl.int64)[:, None] * IN, output.to(tl.int64)[None, :] * IN
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, IN, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        code = tl.load(code_ptr + code_row + at[:, None], mask=(at < IN)[:, None] & real_output[None, :], other=0)
        x = tl.load(x_ptr + x_row + at[None, :], mask=real_row[:, None] & (at < IN)[None, :], other=0.0)
        if UPCAST:  # multiply in float32: the interpreter's bfloat16 is wrong
            x = x.to(tl.float32)
        total += tl.dot(x, _widened(code, FP8).to(x.dtype), input_precision="ieee").to(tl.float32)
    total *= tl.load(scale_ptr + output, mask=real_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)[None, :]
    where = y_ptr + row.to(tl.int64)[:, None] * OUT + output[None, :]
    tl.store(where, total.to(y_ptr.dtype.element_ty), mask=real_row[:, None] & real_output[None, :])


class TritonByteLinear:
    """`TorchInt8Linear` and `TorchFp8Linear` with the kernel.

    weight      [out_features, in_features] int8 or float8_e4m3fn
    scale       float32 [out_features]: what an output is multiplied by
    bias        [out_features] or None
    activation  None or "gelu_tanh"
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.fp8 = weight.dtype == torch.float8_e4m3fn
        self.codes = weight.contiguous().view(torch.uint8)
        self.scale = (scale * FP8_FACTOR if self.fp8 else scale).contiguous()
        self.bias, self.activation = bias, activation
        self.nbytes = self.codes.nbytes + self.scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in x's number format."""
        y, x = x.new_empty((*x.shape[:-1], self.out_features)), x.contiguous()
        num_rows = x.numel() // self.in_features
        if not num_rows:
            return y
        rows, outputs = tile_of(num_rows, self.out_features, x.itemsize)
        _byte_linear[(triton.cdiv(num_rows, rows), triton.cdiv(self.out_features, outputs))](
            x, self.codes, self.scale, self.bias if self.bias is not None else x, y, num_rows, IN=self.in_features,
            OUT=self.out_features, FP8=self.fp8, HAS_BIAS=self.bias is not None, BLOCK_M=rows, BLOCK_N=outputs,
            BLOCK_K=BLOCK_K, UPCAST=INTERPRETED, num_warps=4,
        )  # fmt: skip
        return y if self.activation is None else F.gelu(y, approximate="tanh")


def tile_of(num_rows: int, out_features: int, itemsize: int) -> tuple[int, int]:
    """(rows of x, outputs) of a program. The interpreter pays per operation, so its tiles are wide; products in float32 stand in registers, so theirs are small."""
    if INTERPRETED:
        return max(16, min(256, next_power_of_2(num_rows))), max(16, min(1024, next_power_of_2(out_features)))
    rows = FEW_ROWS if num_rows <= FEW_ROWS or itemsize == 4 else MANY_ROWS
    return rows, OUTPUTS[rows]


def triton_int8(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> TritonByteLinear:
    """Any weight, quantized to int8. Arguments as in `backends.linear.Pack`."""
    return TritonByteLinear(*int8_linear.quantize(weight), bias, activation)


def triton_fp8(weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> TritonByteLinear:
    """Any weight, quantized to fp8. Arguments as in `backends.linear.Pack`."""
    return TritonByteLinear(*fp8_linear.quantize(weight), bias, activation)
