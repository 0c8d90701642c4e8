"""Adds the exchanges to a worker's model once its weights are loaded, before other hooks pack or quantize them."""

from __future__ import annotations

from torch import nn

from stage03_engine.core.features.distributed import stages
from stage03_engine.core.features.distributed.parallel_layers import TensorParallelModel, make_parallel
from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.hooks import RunnerHook


class ParallelModelHook(RunnerHook):
    """Installed in each worker of several."""

    def model_loaded(self, model: nn.Module) -> nn.Module:
        """The model with its exchanges: within each layer, and with the neighbouring stages."""
        own = ranks()
        if own.tp_size > 1:
            make_parallel(model, own)
        stages.install_ends(model, self.runner)
        return TensorParallelModel(model, self.config.shape.vocab_size) if own.tp_size > 1 else model
