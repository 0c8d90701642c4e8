"""`--load-format dummy` (vllm/model_executor/model_loader/dummy_loader.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.models.registry import model_class


def dummy_tensors(config: VllmConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random weights of the whole model, as a checkpoint would have them: matrices as GPT-2 is initialised, norms and biases neutral."""
    whole = config.shape.whole
    with torch.device("meta"):
        model = model_class(whole.architecture)(whole, config.device_config.attention_backend)
    generator = torch.Generator().manual_seed(config.model_config.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield name, torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator).to(dtype)
        else:
            yield name, torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
