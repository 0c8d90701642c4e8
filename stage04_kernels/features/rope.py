"""Rotary position embedding (vLLM: RotaryEmbedding in model_executor/layers/rotary_embedding).

A head of d numbers is taken as d/2 pairs, number i with number i + d/2. Pair i is rotated by the angle position * f_i, so the
product of a query and a key depends on the distance of their positions only. Low i rotate fast, high i slowly.
Source: Su et al. 2021, "RoFormer".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """cos and sin of every token's angles, each float32 [num_tokens, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [num_tokens, num_heads, head_dim]."""
        return apply_rope(x, self.cos, self.sin)


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """f_i = theta ** (-2i / head_dim) for each pair: float32 [head_dim / 2], in radians per position."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def scale_linear(frequencies: Tensor, factor: float) -> Tensor:
    """Position interpolation (Chen et al. 2023): `factor` times as many positions over the same angles."""
    return frequencies / factor


def scale_llama3(frequencies: Tensor, factor: float, low: float, high: float, original_positions: int) -> Tensor:
    """Llama 3.1's scaling: a pair that turns more than `high` times within the original context stays as it is, one that
    turns less than `low` times is slowed by `factor`, and those between are blended. Source: Meta's published model code."""
    turns = original_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: as it is, 0: slowed
    return frequencies * (kept + (1.0 - kept) / factor)


def rope_cos_sin(positions: Tensor, frequencies: Tensor) -> Rotation:
    """cos and sin of every angle. All layers of a step share them.

    positions   [num_tokens] int64, or [num_tokens, head_dim / 2] if each pair of a token has its own
    frequencies [head_dim / 2] float32
    """
    each = positions[:, None] if positions.dim() == 2 else positions[:, None, None]
    angles = each.float() * frequencies
    return Rotation(angles.cos(), angles.sin())


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x [num_tokens, num_heads, head_dim]; computed in float32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
