"""Quantizes a model's matrices once the weights are loaded (vLLM: model_executor/layers/quantization/online)."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any

import torch
from torch import Tensor

from stage03_engine.core.features.linear_backend.pack import pack_model
from stage03_engine.core.features.quantization.manifest import OUTPUT_MATRIX, product_of
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.mixins import load
from stage04_kernels.backends.linear import Pack, Product
from stage04_kernels.layers import layer_kernels
from stagetrace import trace

logger = logging.getLogger(__name__)


class QuantizedWeightsHook(RunnerHook):
    """Installed with `--quantization`."""

    @torch.inference_mode()
    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The model with quantized matrices; embeddings, norms and biases stay as they are."""
        started, method = time.monotonic(), self.config.model_config.quantization
        name, reason = product_of(self.config, method)
        if reason:
            logger.warning(
                "%s weights are widened for each product, which saves memory and no time: %s", method, reason
            )
        matrices, made = dict[int, int](), list[Any]()  # address -> bytes, as layers may share one; products

        def counted(pack: Pack) -> Pack:
            def keep(weight: Tensor, bias: Tensor | None, activation: str | None, /) -> Product:
                matrices[weight.data_ptr()] = weight.nbytes
                made.append(pack(weight, bias, activation))
                product: Product = made[-1]
                return product

            return keep

        head = load(product_of(self.config, OUTPUT_MATRIX.get(method, method))[0])
        gelu = layer_kernels(self.config.device_config.attention_backend).gelu
        pack_model(model, counted(load(name)), gelu, counted(head))
        for parameter in model.parameters():  # a view of the checkpoint's file would keep all of it in memory
            parameter.data = parameter.data.clone()
        give_back_memory()
        if trace.on:
            trace.emit(
                "weights.quantized", method=method, product=name.rpartition(":")[2], layers=len(made),
                bytes_before=sum(matrices.values()), bytes_after=sum(product.nbytes for product in made),
                seconds=round(time.monotonic() - started, 4),
            )  # fmt: skip
        return model


def give_back_memory() -> None:
    """Return to the system what the checkpoint's matrices took: glibc would keep some of it for later, and the KV cache gets less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
