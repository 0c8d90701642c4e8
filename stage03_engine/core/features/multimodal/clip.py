"""CLIP's vision tower (Radford et al. 2021; vllm/model_executor/models/clip.py): a picture's squares, each a vector, look at one another.

The layers are torch's own, since those of a language model may be packed or given adapters. Names are those of the checkpoint. Only the
layers whose output is used are there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stage03_engine.multimodal.shape_fields import Qwen2VisionShape, VisionShape


def quick_gelu(x: Tensor) -> Tensor:
    """An approximation of GELU that CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": quick_gelu, "gelu": F.gelu}


class CLIPVisionEmbeddings(nn.Module):
    """Squares become vectors, with one in front that stands for the class, and the place of each added."""

    def __init__(self, vision: VisionShape) -> None:
        super().__init__()
        size, patch = vision.hidden_size, vision.patch_size
        self.class_embedding = nn.Parameter(torch.empty(size))
        self.patch_embedding = nn.Conv2d(3, size, kernel_size=patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding.from_pretrained(torch.empty(vision.num_patches + 1, size))

    def forward(self, pixels: Tensor) -> Tensor:
        """[1, 3, image_size, image_size] -> [1, 1 + num_patches, hidden_size]."""
        squares = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(pixels), 1, -1)
        return torch.cat([first, squares], dim=1) + self.position_embedding.weight


class CLIPAttention(nn.Module):
    """Each vector looks at all others: there is no order, no mask and no cache."""

    def __init__(self, vision: VisionShape) -> None:
        super().__init__()
        size = vision.hidden_size
        self.num_heads = vision.num_heads
        self.q_proj, self.k_proj = nn.Linear(size, size), nn.Linear(size, size)
        self.v_proj, self.out_proj = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (  # [1, num_heads, num_vectors, head_dim]
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class CLIPMLP(nn.Module):
    """Wide, and narrow again. Qwen2-VL's tower has the same."""

    def __init__(self, vision: VisionShape | Qwen2VisionShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision.hidden_size, vision.intermediate_size)
        self.fc2 = nn.Linear(vision.intermediate_size, vision.hidden_size)
        self.activation = ACTIVATIONS[vision.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class CLIPEncoderLayer(nn.Module):
    """Norm before each half, residual around it."""

    def __init__(self, vision: VisionShape) -> None:
        super().__init__()
        size, eps = vision.hidden_size, vision.layer_norm_eps
        self.layer_norm1, self.self_attn = nn.LayerNorm(size, eps), CLIPAttention(vision)
        self.layer_norm2, self.mlp = nn.LayerNorm(size, eps), CLIPMLP(vision)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class CLIPEncoder(nn.Module):
    """The layers that are used."""

    def __init__(self, vision: VisionShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CLIPEncoderLayer(vision) for _ in range(vision.num_used_layers))


class CLIPVisionTransformer(nn.Module):
    """Embeddings, a norm (whose name is misspelt in every checkpoint), layers. The last layer's norm is for the class alone."""

    def __init__(self, vision: VisionShape) -> None:
        super().__init__()
        self.embeddings = CLIPVisionEmbeddings(vision)
        self.pre_layrnorm = nn.LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.encoder = CLIPEncoder(vision)

    def forward(self, pixels: Tensor) -> Tensor:
        """[1, 3, image_size, image_size] -> [1, 1 + num_patches, hidden_size]."""
        x = self.pre_layrnorm(self.embeddings(pixels))
        for layer in self.encoder.layers:
            x = layer(x)
        return x
