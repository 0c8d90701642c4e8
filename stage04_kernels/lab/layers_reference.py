"""The slow twins of layers.py and features/rope.py: one number at a time. vLLM has no counterpart file."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of each row of x [..., size]."""
    output = torch.empty_like(x)
    rows, out_rows = x.reshape(-1, x.shape[-1]).tolist(), output.view(-1, x.shape[-1])
    for index, row in enumerate(rows):
        mean = math.fsum(row) / len(row)
        scale = 1.0 / math.sqrt(math.fsum((value - mean) ** 2 for value in row) / len(row) + eps)
        normed = [(value - mean) * scale * w + b for value, w, b in zip(row, weight.tolist(), bias.tolist())]
        out_rows[index] = torch.tensor(normed)
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row of x [..., size]."""
    output = torch.empty_like(x)
    rows, out_rows, weights = x.reshape(-1, x.shape[-1]).tolist(), output.view(-1, x.shape[-1]), weight.tolist()
    for index, row in enumerate(rows):
        scale = 1.0 / math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        out_rows[index] = torch.tensor([value * scale * w for value, w in zip(row, weights)])
    return output


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh approximation."""
    values = [
        0.5 * v * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3))) for v in x.flatten().tolist()
    ]
    return torch.tensor(values).view(x.shape).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist())
    return torch.tensor([g / (1.0 + math.exp(-g)) * u for g, u in pairs]).view(gate.shape).to(gate.dtype)


def apply_rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """The rotary embedding of x [num_tokens, num_heads, head_dim]: a pair is a complex number, and rotating it is one
    product."""
    output = torch.empty_like(x)
    half = x.shape[-1] // 2
    for token, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies.tolist()):
            # The angle is rounded once, as on the fast path.
            angle = torch.tensor(position * frequency, dtype=torch.float32).item()
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(x.shape[1]):
                turned = complex(float(x[token, head, pair]), float(x[token, head, pair + half])) * turn
                output[token, head, pair], output[token, head, pair + half] = turned.real, turned.imag
    return output
