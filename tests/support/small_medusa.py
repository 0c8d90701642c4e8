"""Medusa heads for tests, and their slow twin, written down from the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_heads import plain_hidden, write_heads
from torch import Tensor

HEADS, VOCAB = 3, 2048


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    known = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 256, "vocab_size": VOCAB}
    return write_heads(folder, tensors, known | {"num_heads": HEADS, "num_hidden_layers": 1} | config)


def random_heads(hidden_size: int = 256, seed: int = 0, scale: float = 0.02) -> dict[str, Tensor]:
    """A block of one layer, and an output matrix, for each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {f"blocks.{head}.layers.0.weight": (hidden_size, hidden_size) for head in range(HEADS)}
    sizes |= {f"lm_heads.{head}.weight": (VOCAB, hidden_size) for head in range(HEADS)}
    return {name: torch.randn(size, generator=generator) * scale for name, size in sizes.items()}


def plain_guesses(tensors: dict[str, Tensor], hidden: Tensor) -> list[int]:
    """What the heads of a checkpoint say about one hidden state: W2 (h + silu(W1 h))."""
    found = []
    for head in range(HEADS):
        x, layer = hidden, 0
        while (name := f"blocks.{head}.layers.{layer}") + ".weight" in tensors:
            x = x + F.silu(F.linear(x, tensors[name + ".weight"], tensors.get(name + ".bias")))
            layer += 1
        matrix = tensors.get(f"lm_heads.{head}.weight", tensors["lm_heads.0.weight"])
        found.append(int((matrix @ x).argmax()))
    return found


@torch.inference_mode()
def fitted_heads(model: Any, texts: list[list[int]]) -> dict[str, Tensor]:
    """Heads that are right now and then: random blocks, and output matrices fitted to these texts (least squares)."""
    tensors, hidden = random_heads(), [plain_hidden(model, text) for text in texts]
    for head in range(HEADS):
        states = torch.cat([each[: -head - 2] for each in hidden])
        labels = torch.cat([torch.tensor(text[head + 2 :]) for text in texts])
        x = states + F.silu(states @ tensors[f"blocks.{head}.layers.0.weight"].T)
        gram = x.T @ x + 1.0 * torch.eye(256)
        fitted = torch.linalg.solve(gram, x.T @ F.one_hot(labels, VOCAB).float())
        tensors[f"lm_heads.{head}.weight"] = 20 * fitted.T
    return tensors
