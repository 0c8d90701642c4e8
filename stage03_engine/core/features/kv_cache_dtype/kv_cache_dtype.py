"""The model runner's side of `--kv-cache-dtype`: every layer's attention writes and reads codes of 8 bits (vLLM: Attention.kv_cache_dtype)."""

from __future__ import annotations

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.kv_cache_size import head_layout, kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.errors import ConfigError
from stage04_kernels.attention import AttentionBackend
from stage04_kernels.features.kv_cache_8bit.attention import choose_attention
from stage04_kernels.features.kv_cache_8bit.cache import as_stored
from stage04_kernels.features.kv_cache_8bit.formats import FORMATS, KVFormat
from stagetrace import trace


class QuantizedCacheHook(RunnerHook):
    """Installed with `--kv-cache-dtype` other than auto. Raises ConfigError if torch does not know the format on this device."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.format = FORMATS[head_layout(config)[0]]
        self.path = ""
        try:
            as_stored(torch.ones(1, 1, device=runner.device), self.format)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"kv_cache_dtype {self.format.name} cannot be used: torch {torch.__version__} has no {self.format.dtype} on {runner.device.type}"
            ) from error

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, with another attention in each layer. Raises ConfigError for a model that keeps its attention elsewhere."""
        self.path = with_8bit_cache(model, self.config.device_config.attention_backend, self.format)
        return model

    def cache_allocated(self, num_blocks: int) -> None:
        """Say what a block takes."""
        if trace.on:
            num_bytes = kv_block_bytes(self.config)
            trace.emit("kv_cache.quantized", format=self.format.name, path=self.path, block_bytes=num_bytes)


def with_8bit_cache(model: torch.nn.Module, backend: str, kv_format: KVFormat) -> str:
    """Let every layer of the model, which calls its `attention`, write and read codes. Returns which path its attention takes. Raises ConfigError for a
    model without such layers."""
    layers = [layer for layer in model.modules() if callable(getattr(layer, "attention", None))]
    if not layers:
        raise ConfigError(
            f"kv_cache_dtype {kv_format.name} needs a model whose layers call `self.attention`; {type(model).__name__} has none"
        )
    chosen: dict[AttentionBackend, AttentionBackend] = {}
    path = ""
    for layer in layers:
        own: AttentionBackend = layer.attention  # type: ignore[assignment]
        if own not in chosen:
            path, chosen[own] = choose_attention(own, backend, kv_format)
        layer.attention = chosen[own]  # type: ignore[assignment]
    return path
