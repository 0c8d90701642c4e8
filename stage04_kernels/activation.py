"""Activations between the two matrices of an MLP, fast and slow (vLLM: model_executor/layers/activation.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stage04_kernels.backend_names import is_triton


def gelu(x: Tensor, backend: str = "torch") -> Tensor:
    """GELU (Hendrycks and Gimpel 2016) in the tanh approximation, which GPT-2 was trained with; any shape."""
    if is_triton(backend, x.device.type):
        from stage04_kernels.triton_kernels.layers import gelu_triton

        return gelu_triton(x)
    return F.gelu(x, approximate="tanh")


def silu_and_mul(gate: Tensor, up: Tensor, backend: str = "torch") -> Tensor:
    """silu(gate) * up, the middle of SwiGLU (Shazeer 2020); any shape."""
    if is_triton(backend, gate.device.type):
        from stage04_kernels.triton_kernels.layers import silu_and_mul_triton

        return silu_and_mul_triton(gate, up)
    return F.silu(gate) * up


def gelu_reference(x: Tensor) -> Tensor:
    """One number at a time."""
    values = [
        0.5 * v * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3))) for v in x.flatten().tolist()
    ]
    return torch.tensor(values).view(x.shape).to(x.dtype)


def silu_and_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """One number at a time."""
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist())
    return torch.tensor([g / (1.0 + math.exp(-g)) * u for g, u in pairs]).view(gate.shape).to(gate.dtype)
