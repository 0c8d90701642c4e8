"""Qwen2-VL's vision tower (vllm/model_executor/models/qwen2_vl.py, Qwen2VisionTransformer): pictures of any size.

Squares know where they are by a rotary embedding of two components, so no table of positions fixes a size. At the end a merger makes one vector of
each 2 x 2 squares, so the squares are in an order in which these are neighbours. Names are those of the checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.core.features.multimodal.clip import CLIPMLP
from stage03_engine.multimodal.shape_fields import Qwen2VisionShape
from stage04_kernels.features.rope import Rotation, rope_cos_sin, rope_frequencies

EPS = 1e-6


def in_units(x: Tensor, vision: Qwen2VisionShape) -> Tensor:
    """Pixels [3, height, width] cut into squares [num_squares, 3, side, side], those of a unit behind one another."""
    channels, high, wide = x.shape
    merge, side = vision.merge_size, vision.patch_size
    cut = x.view(channels, high // (merge * side), merge, side, wide // (merge * side), merge, side)
    return cut.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)


class PatchEmbed(nn.Module):
    """Squares become vectors. The tower also reads videos, several pictures at a time: a still one is repeated."""

    def __init__(self, vision: Qwen2VisionShape) -> None:
        super().__init__()
        self.vision = vision
        size = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        self.proj = nn.Conv3d(3, vision.hidden_size, kernel_size=size, stride=size, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[3, height, width] -> [num_squares, hidden_size]."""
        squares = in_units(pixels, self.vision)[:, :, None]  # [num_squares, 3, 1, side, side]
        repeated = squares.expand(-1, -1, self.vision.temporal_patch_size, -1, -1)
        return F.linear(repeated.flatten(1), self.proj.weight.flatten(1))


class VisionAttention(nn.Module):
    """Each square looks at all others, and sees how far away they are."""

    def __init__(self, vision: Qwen2VisionShape) -> None:
        super().__init__()
        self.num_heads = vision.num_heads
        self.qkv = nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        self.proj = nn.Linear(vision.hidden_size, vision.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [num_squares, 3, num_heads, head_dim]
        query, key = rotation.apply(qkv[:, 0]), rotation.apply(qkv[:, 1])
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, qkv[:, 2]))
        out = F.scaled_dot_product_attention(query, key, value)
        return self.proj(out[0].transpose(0, 1).flatten(1))


class VisionBlock(nn.Module):
    """Norm before each half, residual around it."""

    def __init__(self, vision: Qwen2VisionShape) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(vision.hidden_size, EPS), VisionAttention(vision)
        self.norm2, self.mlp = nn.LayerNorm(vision.hidden_size, EPS), CLIPMLP(vision)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """The squares of a unit become one vector, as wide as the language model."""

    def __init__(self, vision: Qwen2VisionShape, hidden_size: int) -> None:
        super().__init__()
        self.wide = vision.hidden_size * vision.merge_size**2
        self.ln_q = nn.LayerNorm(vision.hidden_size, EPS)
        self.mlp = nn.Sequential(nn.Linear(self.wide, self.wide), nn.GELU(), nn.Linear(self.wide, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self.wide))


class Qwen2VisionTransformer(nn.Module):
    """Squares, blocks, merger."""

    frequencies: Tensor

    def __init__(self, vision: Qwen2VisionShape, hidden_size: int) -> None:
        super().__init__()
        self.vision = vision
        self.patch_embed = PatchEmbed(vision)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.num_layers))
        self.merger = PatchMerger(vision, hidden_size)
        each = rope_frequencies(vision.hidden_size // vision.num_heads // 2, vision.rope_theta)
        # Half of the pairs turn with the row, half with the column.
        self.register_buffer("frequencies", torch.cat([each, each]), False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[3, height, width] -> [num_units, hidden_size of the language model], row by row."""
        x, rotation = self.patch_embed(pixels), self._rotation(*pixels.shape[1:])
        for block in self.blocks:
            x = block(x, rotation)
        return self.merger(x)

    def _rotation(self, height: int, width: int) -> Rotation:
        """By the row and the column of each square."""
        side, merge = self.vision.patch_size, self.vision.merge_size
        rows, columns = torch.meshgrid(torch.arange(height // side), torch.arange(width // side), indexing="ij")
        cut = torch.stack([rows, columns]).view(2, height // side // merge, merge, width // side // merge, merge)
        places = cut.permute(1, 3, 2, 4, 0).reshape(-1, 2)  # [num_squares, 2], in the order of `in_units`
        pairs = places.to(self.frequencies.device).repeat_interleave(len(self.frequencies) // 2, dim=1)
        return rope_cos_sin(pairs, self.frequencies)
