"""The linear layer of plain torch, as a backend among others."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class TorchLinear:
    """Multiplies by the weights where they lie. Arguments as in `backends.linear.Pack`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        self.weight, self.bias, self.activation = weight, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else F.gelu(y, approximate="tanh")
