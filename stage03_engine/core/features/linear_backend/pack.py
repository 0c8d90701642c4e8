"""Packs the weights of a model's linear layers, once the weights are loaded (vLLM: process_weights_after_loading)."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.layers import LanguageModel, Linear
from stage04_kernels.backends.linear import ByRows, Pack, fastest, get_linear_backend
from stage04_kernels.layers import layer_kernels
from stagetrace import trace
from stagetrace.terminal import counted

logger = logging.getLogger(__name__)


class PackedWeightsHook(RunnerHook):
    """Installed on a CPU, unless `--linear-backend torch`."""

    chosen: tuple[str, str] | None = None  # what was measured: weights that are loaded again are multiplied alike

    @torch.inference_mode()
    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The model with packed weights."""
        started, name = time.monotonic(), self.config.device_config.linear_backend
        layers = [module for module in model.modules() if isinstance(module, Linear) and module.product is None]
        matrices: list[tuple[Tensor, Tensor | None]] = [(layer.matrix, layer.bias) for layer in layers]
        if not layers and isinstance(output := getattr(model, "output_matrix", None), Tensor):
            matrices = [(output, None)]  # something else multiplies in all layers
        few = many = "torch" if name == "auto" and not matrices else name
        if name == "auto" and matrices:
            if self.chosen is None:
                few, many, measured = fastest(*max(matrices, key=lambda one: one[0].numel()))
                logger.info("Linear layers: %s for few rows, %s for many (%s)", few, many, measured)
                self.chosen = few, many
            few, many = self.chosen
        if few != "torch" or many != "torch":
            gelu = layer_kernels(self.config.device_config.attention_backend).gelu
            pack_model(model, both(get_linear_backend(few), get_linear_backend(many)), gelu)
        if trace.on:
            trace.emit(
                "weights.packed", few=few, many=many, layers=len(layers), seconds=round(time.monotonic() - started, 4)
            )
        return model


def both(few: Pack, many: Pack) -> Pack:
    """One backend for few rows, another one for many; the weights are packed twice if they differ."""
    if few is many:
        return few
    return lambda weight, bias, activation: ByRows(few(weight, bias, activation), many(weight, bias, activation))


def pack_model(model: nn.Module, pack: Pack, gelu: object, head: Pack | None = None) -> None:
    """Let packed weights multiply in all linear layers where nothing else does already, and make the logits; `head` packs the output matrix, if that is
    packed otherwise."""
    packable = [module for module in model.modules() if isinstance(module, Linear | LanguageModel)]
    for module in counted(packable, "packing the weights"):
        if isinstance(module, Linear) and module.product is None:
            pack_layer(module, pack, gelu)
        elif isinstance(module, LanguageModel):
            matrix = getattr(module, "output_matrix", None)
            if isinstance(matrix, Tensor):  # a classifier has none, nor has a stage of a pipeline that is not the last
                module.logits_product = (head or pack)(matrix, None, None)


def pack_layer(layer: Linear, pack: Pack, gelu: object) -> None:
    """A layer that ends with `gelu`, with nothing between product and activation, becomes one product."""
    fused = layer.activation is gelu and gelu is not None and not layer.addends
    layer.multiply_by(pack(layer.matrix, layer.bias, "gelu_tanh" if fused else None))
    if fused:
        layer.activation = None
