"""Puts packed layers in the place of a model's plain ones, once the weights are loaded (vLLM: process_weights_after_loading)."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor, nn

from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.layers import Linear
from stage04_kernels.backends.linear import ByRows, Pack, Product, fastest, get_linear_backend
from stage04_kernels.layers import layer_kernels
from stagetrace import trace

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """A linear layer whose weights a backend holds."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's own."""
        return self.product(x)


class PackedWeightsHook(RunnerHook):
    """Installed on a CPU, unless `--linear-backend torch`."""

    @torch.inference_mode()
    def model_loaded(self, model: nn.Module) -> nn.Module:
        """The model with packed weights."""
        started, name = time.monotonic(), self.config.device_config.linear_backend
        layers = [module for module in model.modules() if isinstance(module, Linear)]
        few = many = name
        if name == "auto" and layers:
            largest = max(layers, key=lambda layer: layer.weight.numel())
            few, many, measured = fastest(largest.matrix, largest.bias)
            logger.info("Linear layers: %s for few rows, %s for many (%s)", few, many, measured)
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


def pack_model(model: nn.Module, pack: Pack, gelu: object) -> None:
    """Replace all linear layers, and the output matrix, which is not one of them: it may be the token embedding too. A layer that ends
    with `gelu` becomes one product; another activation stays a call of its own."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear):
                setattr(parent, name, PackedLinear(packed(layer, pack, gelu)))
        if isinstance(matrix := getattr(parent, "output_matrix", None), Tensor):
            _replace_logits(parent, pack(matrix, None, None))


def packed(layer: Linear, pack: Pack, gelu: object) -> Product:
    """The product that stands for a layer."""
    activation = layer.activation
    if activation is None or activation is gelu:
        return pack(layer.matrix, layer.bias, None if activation is None else "gelu_tanh")
    product = pack(layer.matrix, layer.bias, None)
    return lambda x: activation(product(x))


def _replace_logits(model: nn.Module, product: Product) -> None:
    model.compute_logits = lambda hidden_states: product(hidden_states).float()  # type: ignore[assignment]
