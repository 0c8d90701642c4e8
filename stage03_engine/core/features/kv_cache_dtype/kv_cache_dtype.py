"""The model runner's side of `--kv-cache-dtype`: every layer's attention writes and reads codes of 8 bits (vLLM: Attention.kv_cache_dtype)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_cache_dtype.scales import KEYS, VALUES, Scales, without_scales
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.kv_cache_size import head_layout, kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.errors import ConfigError
from stage04_kernels.attention import AttentionBackend
from stage04_kernels.features.kv_cache_8bit.attention import choose_attention, with_scales
from stage04_kernels.features.kv_cache_8bit.cache import as_stored
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS, KVFormat
from stagetrace import trace

logger = logging.getLogger(__name__)


class QuantizedCacheHook(RunnerHook):
    """Installed with `--kv-cache-dtype` other than auto. Raises ConfigError if torch does not know the format on this device."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.format = FORMATS[head_layout(config)[0]]
        self.path = ""
        self.scales: Scales = {}  # that the checkpoint brings
        try:
            as_stored(torch.ones(1, 1, device=runner.device), self.format)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"kv_cache_dtype {self.format.name} cannot be used: torch {torch.__version__} has no {self.format.dtype} on {runner.device.type}"
            ) from error

    def weights(self, tensors: Iterator[tuple[str, Tensor]], model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        """All but the scales of the cache. Raises ConfigError for one that cannot be used."""
        return without_scales(tensors, self.scales, self.format, self.runner.dtype)

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, with another attention in each layer. Raises ConfigError for a model that keeps its attention elsewhere, and for scales of a layer
        that it does not have."""
        self.path = with_8bit_cache(model, self.config.device_config.attention_backend, self.format, self.scales)
        if self.scales:
            logger.info("The checkpoint has scales for the KV cache of %d layers", len(self.scales))
        return model

    def cache_allocated(self, num_blocks: int) -> None:
        """Say what a block takes."""
        if trace.on:
            num_bytes = kv_block_bytes(self.config)
            trace.emit("kv_cache.quantized", format=self.format.name, path=self.path, block_bytes=num_bytes)


def with_8bit_cache(
    model: torch.nn.Module, backend: str, kv_format: KVFormat, scales: Mapping[int, Mapping[str, float]] | None = None
) -> str:
    """Let every layer of the model, which calls its `attention`, write and read codes; `scales` multiply those of some layers. Returns which path its
    attention takes. Raises ConfigError for a model without such layers, or with fewer than `scales` names."""
    layers = [layer for layer in model.modules() if callable(getattr(layer, "attention", None))]
    if not layers:
        raise ConfigError(
            f"kv_cache_dtype {kv_format.name} needs a model whose layers call `self.attention`; {type(model).__name__} has none"
        )
    if unknown := [number for number in scales or {} if number >= len(layers)]:
        raise ConfigError(
            f"the checkpoint has a scale for the KV cache of layer {unknown[0]}, which the model does not have"
        )
    chosen: dict[AttentionBackend, AttentionBackend] = {}
    path = ""
    for number, layer in enumerate(layers):
        own: AttentionBackend = layer.attention  # type: ignore[assignment]
        if own not in chosen:
            path, chosen[own] = choose_attention(own, backend, kv_format)
        layer.attention = chosen[own]  # type: ignore[assignment]
        if found := (scales or {}).get(number):  # one alone is for both, as in vLLM
            keys, values = found.get(KEYS, found.get(VALUES, 1.0)), found.get(VALUES, found.get(KEYS, 1.0))
            layer.attention = with_scales(chosen[own], keys, values)  # type: ignore[assignment]
    return path
