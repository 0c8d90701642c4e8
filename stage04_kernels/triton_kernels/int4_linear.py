"""The product of int4 weights (vLLM: kernels/linear/mixed_precision, of which triton_w4a16 is one; the idea is in Frantar et al. 2022, "GPTQ"). The twin is
`TorchInt4Linear` of stage04_kernels/backends/int4_linear.py.

A program takes some rows of x and some outputs, and goes along the inputs, `BLOCK_K` at a time: it loads half as many bytes of codes, takes each apart in registers
and multiplies on the matrix unit. A byte holds two inputs that lie half a block apart, so that both halves of x are read side by side.

Code minus zero is a whole number up to 16, which every number format of a model holds exactly. So where a block lies within one group of inputs, these numbers are multiplied,
and the sum by the scale; where groups are smaller, each weight is multiplied by its own scale first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backends.int4_linear import Int4Weights, codes_of
from stage04_kernels.triton_kernels.tiles import INTERPRETED, next_power_of_2

LEAST_BLOCK, MOST_BLOCK = 32, 64
"""Inputs at a time. Half of them are one product, and no matrix unit takes less than 16; more would take too many registers in float32."""
FEW_ROWS, MANY_ROWS = 16, 64
OUTPUTS = {FEW_ROWS: 32, MANY_ROWS: 64}  # more programs read the weights of a decode; a prompt reads them less often


@triton.jit
def _weights(code, scale_ptr, zero_ptr, column, output, real, groups, GROUP: tl.constexpr):
    """(code - zero) * scale, [BLOCK_K / 2, BLOCK_N]; `real` is of this shape."""
    at = output[None, :] * groups + (column // GROUP)[:, None]
    zero = tl.load(zero_ptr + at, mask=real, other=0).to(tl.float32)
    return (code.to(tl.float32) - zero) * tl.load(scale_ptr + at, mask=real, other=0.0)


@triton.jit
def _int4_linear(
    x_ptr,  # [num_rows, IN]
    code_ptr,  # uint8 [OUT, blocks * BLOCK_K / 2]
    scale_ptr,  # float32 [OUT, groups]
    zero_ptr,  # uint8 [OUT, groups]
    bias_ptr,  # [OUT]
    y_ptr,  # [num_rows, OUT]
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_row, real_output = row < num_rows, output < OUT
    HALF: tl.constexpr = BLOCK_K // 2
    BYTES: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K * HALF  # of an output
    groups = (IN + GROUP - 1) // GROUP
    half, x_row = tl.arange(0, HALF), row.to(tl.int64)[:, None] * IN
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, IN, BLOCK_K):
        byte = tl.load(
            code_ptr + output.to(tl.int64)[None, :] * BYTES + (start // 2 + half)[:, None], mask=real_output[None, :], other=0
        )  # fmt: skip
        low, high = start + half, start + HALF + half
        x_low = tl.load(x_ptr + x_row + low[None, :], mask=real_row[:, None] & (low < IN)[None, :], other=0.0)
        x_high = tl.load(x_ptr + x_row + high[None, :], mask=real_row[:, None] & (high < IN)[None, :], other=0.0)
        if UPCAST:  # multiply in float32: the interpreter's bfloat16 is wrong
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        if ONE_GROUP:
            at = output * groups + start // GROUP
            zero = tl.load(zero_ptr + at, mask=real_output, other=0).to(tl.float32)[None, :]
            w_low, w_high = (byte & 15).to(tl.float32) - zero, (byte >> 4).to(tl.float32) - zero
        else:
            w_low = _weights(
                byte & 15, scale_ptr, zero_ptr, low, output, (low < IN)[:, None] & real_output[None, :], groups, GROUP
            )  # fmt: skip
            w_high = _weights(
                byte >> 4, scale_ptr, zero_ptr, high, output, (high < IN)[:, None] & real_output[None, :], groups, GROUP
            )  # fmt: skip
        part = tl.dot(x_low, w_low.to(x_low.dtype), input_precision="ieee").to(tl.float32)
        part += tl.dot(x_high, w_high.to(x_high.dtype), input_precision="ieee").to(tl.float32)
        if ONE_GROUP:
            part *= tl.load(scale_ptr + at, mask=real_output, other=0.0)[None, :]
        total += part
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=real_output, other=0.0).to(tl.float32)[None, :]
    where = y_ptr + row.to(tl.int64)[:, None] * OUT + output[None, :]
    tl.store(where, total.to(y_ptr.dtype.element_ty), mask=real_row[:, None] & real_output[None, :])


def block_of(group: int) -> tuple[int, bool]:
    """(inputs at a time, whether they all lie in one group)."""
    block = min(MOST_BLOCK, group & -group)  # the largest power of two that divides it
    return (block, True) if block >= LEAST_BLOCK else (MOST_BLOCK, False)


class TritonInt4Linear:
    """`TorchInt4Linear` with the kernel. Arguments as there; x in any number format of a model."""

    def __init__(self, weights: Int4Weights, bias: Tensor | None = None, activation: str | None = None) -> None:
        self.out_features, self.in_features = weights.codes.shape
        self.scale, self.zero = weights.scale.contiguous(), weights.zero.contiguous()
        self.group = min(weights.group, self.in_features)
        self.block, self.one_group = block_of(self.group)
        codes = F.pad(weights.codes, (0, -self.in_features % self.block)).unflatten(1, (-1, 2, self.block // 2))
        self.packed = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1).contiguous()
        self.order = None if weights.order is None else weights.order.long()
        self.bias, self.activation = bias, activation
        self.nbytes = self.packed.nbytes + self.scale.nbytes + self.zero.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], in x's number format."""
        y = x.new_empty((*x.shape[:-1], self.out_features))
        x = (x if self.order is None else x[..., self.order]).contiguous()
        num_rows = x.numel() // self.in_features
        if not num_rows:
            return y
        rows, outputs, num_warps = tile_of(num_rows, self.out_features, x.itemsize)
        _int4_linear[(triton.cdiv(num_rows, rows), triton.cdiv(self.out_features, outputs))](
            x, self.packed, self.scale, self.zero, self.bias if self.bias is not None else x, y, num_rows,
            IN=self.in_features, OUT=self.out_features, GROUP=self.group, ONE_GROUP=self.one_group, HAS_BIAS=self.bias is not None,
            BLOCK_M=rows, BLOCK_N=outputs, BLOCK_K=self.block, UPCAST=INTERPRETED, num_warps=num_warps,
        )  # fmt: skip
        return y if self.activation is None else F.gelu(y, approximate="tanh")


def tile_of(num_rows: int, out_features: int, itemsize: int) -> tuple[int, int, int]:
    """(rows of x, outputs, warps) of a program. The interpreter pays per operation, so its tiles are wide; products in float32 stand in registers, so theirs are
    small."""
    if INTERPRETED:
        return max(16, min(256, next_power_of_2(num_rows))), max(16, min(1024, next_power_of_2(out_features))), 4
    rows = FEW_ROWS if num_rows <= FEW_ROWS or itemsize == 4 else MANY_ROWS
    return rows, OUTPUTS[rows], 4


def triton_int4(
    weight: Tensor | Int4Weights, bias: Tensor | None = None, activation: str | None = None
) -> TritonInt4Linear:
    """Any weight, quantized unless it is already. Arguments as in `backends.linear.Pack`."""
    return TritonInt4Linear(codes_of(weight), bias, activation)
