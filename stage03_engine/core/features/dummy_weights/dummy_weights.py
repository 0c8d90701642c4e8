"""`--load-format dummy` (vllm/model_executor/model_loader/dummy_loader.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def dummy_tensors(model: nn.Module, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random weights: matrices as GPT-2 is initialised, norms and biases neutral."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield name, torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator).to(dtype)
        else:
            yield name, torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
