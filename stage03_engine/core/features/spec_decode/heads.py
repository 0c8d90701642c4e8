"""What Medusa's heads and an EAGLE head have in common once they run: weights of their own, loaded beside the target's, and a length up to which they draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.spec_decode.drafter import Drafter
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.models.loader import checkpoint_tensors


class HeadsHook(Drafter):
    """Drafts by a module of its own, `heads`, which has `load_weights`, as a model does."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        own = config.speculative_config
        self.context = min(own.draft_max_model_len, config.max_model_len)
        with torch.device("meta"):
            self.heads: Any = self.make_heads(**(own.draft_heads or {}))

    def make_heads(self, **sizes: Any) -> nn.Module:
        """The module, without its weights, of what is configured as `draft_heads`."""
        raise NotImplementedError

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The heads are loaded beside it."""
        own, runner = self.config.speculative_config, self.runner
        dummy = own.draft_load_format == "dummy"
        self.heads.load_weights(self.random() if dummy else checkpoint_tensors(Path(own.draft_model_path or "")))
        for parameter in self.heads.parameters():
            parameter.data = parameter.data.to(device=runner.device, dtype=runner.dtype)
        for buffer in self.heads.buffers():  # computed, or numbers of tokens
            buffer.data = buffer.data.to(runner.device)
        return model

    def random(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `--load-format dummy`."""
        generator = torch.Generator().manual_seed(self.config.model_config.seed)
        for name, parameter in self.heads.named_parameters():
            yield name, torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
