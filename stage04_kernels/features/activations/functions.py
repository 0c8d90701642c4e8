"""Activations that torch does not have under a name of its own (transformers/activations.py). All keep shape and dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in the tanh approximation; transformers writes the same formula in several ways."""
    return F.gelu(x, approximate="tanh")


def gelu_10(x: Tensor) -> Tensor:
    """GELU, clipped to [-10, 10]; Wu et al. 2020."""
    return F.gelu(x).clamp(-10, 10)


def quick_gelu(x: Tensor) -> Tensor:
    """GELU, approximated by a sigmoid; Hendrycks and Gimpel 2016."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU; So et al. 2021, "Primer"."""
    return F.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """The distribution function of a normal distribution that approximates relu2; Ma et al. 2022, "Mega"."""
    mean, deviation = 0.707107, 0.282095
    return 0.5 * (1.0 + torch.erf((x - mean) / (deviation * math.sqrt(2.0))))


def sqrtsoftplus(x: Tensor) -> Tensor:
    """The square root of softplus."""
    return torch.sqrt(F.softplus(x))


def linear(x: Tensor) -> Tensor:
    """Nothing."""
    return x
