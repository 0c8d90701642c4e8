"""Cuts a worker's part out of the weights, and adds the exchanges to its model, before other hooks pack or quantize them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from stage03_engine.core.features.distributed import stage_ends, stages
from stage03_engine.core.features.distributed.parallel_layers import TensorParallelModel, make_parallel
from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.features.distributed.sharded_weights import cut_vocabulary, own_slices
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.model_path import weight_format


class ParallelModelHook(RunnerHook):
    """Installed in each worker of several."""

    def weights(self, tensors: Iterator[tuple[str, Tensor]], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """The slices that this worker has; `model` loses what other workers have."""
        own, whole = ranks(), self.config.shape.whole
        cut_vocabulary(model, whole, own)
        stages.leave_out(model, whole, own)
        form = weight_format(self.config.model_config.load_format)
        return tensors if form is not None and form.cut_already else own_slices(tensors, whole, own)

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The model with its exchanges: within each layer, and with the neighbouring stages."""
        own = ranks()
        if own.tp_size > 1:
            make_parallel(model, own)
        if own.pp_size > 1:
            stage_ends.install_ends(model, self.runner, own)
        return TensorParallelModel(model, self.config.shape.vocab_size) if own.tp_size > 1 else model
