"""Matrix products of packed weights, compiled (oneDNN and llama.cpp repack weights for the same reason).

Weights are packed once, when they are loaded, in the order in which the product reads them; native.cpp says how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stage04_kernels.backends.native.library import function, load_library
from stage04_kernels.backends.native.memory import packed_tensor

ACTIVATIONS = {None: 0, "gelu_tanh": 1}
FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}  # of weights
SUFFIXES = {torch.float32: "", torch.bfloat16: "_bf16"}  # of inputs and results
SIDE = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # inputs of one output that are packed side by side


def input_bits() -> int:
    """The number format of inputs with which int8 weights are fastest here: 8 where the processor multiplies such numbers in one
    instruction (AVX512-VNNI, AVX-VNNI, ARM's dotprod), else 16. Raises NativeError."""
    bits: int = load_library().input_bits()
    return bits


class NativeLinear:
    """`activation(x @ weight.T * scale + bias)` for x [num_rows, in_features], in x's number format (float32 or bfloat16).

    weight      [out_features, in_features] float32, bfloat16 or int8, of any strides
    bias        [out_features] or None
    activation  None or "gelu_tanh"
    scale       [out_features] or None: what an output is multiplied by, for quantized weights
    bits        with int8 weights: inputs become integers of 8 bits, in groups of 64, or of 16, in groups of 256

    Sums are float32; with int8 weights, exact integers within a group. A row's result does not depend, in any bit, on the other
    rows. Raises ValueError for other formats, NativeError where nothing can be compiled.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, scale: Tensor | None = None,
        bits: int = 16,
    ) -> None:  # fmt: skip
        if weight.dtype not in FORMATS:
            raise ValueError(f"no product of {weight.dtype} weights is compiled")
        library, name = load_library(), FORMATS[weight.dtype]
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // library.panel_width())
        inputs = -(-self.in_features // SIDE[weight.dtype]) * SIDE[weight.dtype]
        self.packed = packed_tensor(panels * library.panel_width() * inputs, weight.dtype)
        function(f"pack_{name}", "pllplli")(
            weight.data_ptr(), *weight.stride(), self.packed.data_ptr(), self.in_features, self.out_features,
            torch.get_num_threads(),
        )  # fmt: skip
        self.bias = None if bias is None else bias.float().contiguous()
        self.scale = None if scale is None else scale.float().contiguous()
        self.nbytes = self.packed.nbytes + (0 if self.scale is None else self.scale.nbytes)
        scales, offsets = (None if kept is None else kept.data_ptr() for kept in (self.scale, self.bias))
        self.constants = (self.packed.data_ptr(), scales, offsets, ACTIVATIONS[activation])
        name = f"int8_by_{bits}" if weight.dtype == torch.int8 else name
        self.functions = {dtype: function(f"linear_{name}{suffix}", "ppppipllli") for dtype, suffix in SUFFIXES.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features]."""
        x = x.contiguous()
        y = x.new_empty((*x.shape[:-1], self.out_features))
        self.functions[x.dtype](
            x.data_ptr(), *self.constants, y.data_ptr(), x.numel() // self.in_features, self.in_features,
            self.out_features, torch.get_num_threads(),
        )  # fmt: skip
        return y
