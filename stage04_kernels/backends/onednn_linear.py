"""oneDNN's linear layer, with weights in the order that it likes best. torch brings the library; torch.compile calls these functions."""

from __future__ import annotations

import torch
from torch import Tensor

_POST_OPS = {None: ("none", ""), "gelu_tanh": ("gelu", "tanh")}


class OneDNNLinear:
    """Packs and multiplies by oneDNN. Arguments as in `backends.linear.Pack`; bfloat16 where the processor has AVX-512 or AVX-NE-CONVERT.

    Raises RuntimeError where oneDNN cannot, AttributeError if this torch does not have it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias, self.post_op = bias, _POST_OPS[activation]
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        name, algorithm = self.post_op
        y: Tensor = self.multiply(x, self.packed, self.bias, name, [], algorithm)
        return y
