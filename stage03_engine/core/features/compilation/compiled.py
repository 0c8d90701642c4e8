"""The model's layers as graphs (vllm/compilation/decorators.py, support_torch_compile; vllm/v1/attention, unified_attention).

torch.compile runs the model once with tensors that have no values, notes each operation, and lets its backend make fewer and larger ones of them. It cannot look
into paged attention, whose work depends on numbers in the metadata, so attention is one operation of which it knows the shapes alone. The KV cache and the metadata do
not pass through the graph: the operation finds those of the step that runs. Then one graph serves any number of tokens, and a second one a single token.

With mode 1 attention is left as it is, and breaks the graph in each layer: what comes before and after becomes a graph of its own.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.compilation.config_json import WHOLE
from stage03_engine.core.features.compilation.measured import remember, start_row
from stage03_engine.core.features.memory_profile.memory_profile import dummy_inputs
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.errors import ConfigError
from stage04_kernels.attention import AttentionMetadata
from stagetrace import trace

logger = logging.getLogger(__name__)
PROMPT_TOKENS = 32  # any number above 1 gives the same graph


class _Step:
    """What attention needs of the step that runs, and does not come through the graph."""

    def __init__(self) -> None:
        self.layers: list[Callable[..., Tensor]] = []
        self.kv_caches: list[Tensor] = []
        self.metadata: AttentionMetadata | None = None


_steps: list[_Step] = []
"""One for each model of this process; its number is a constant of the model's graphs."""


@torch.library.custom_op("stages::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, rotation: list[Tensor], scale: float, window: int, model: int, layer: int
) -> Tensor:
    """The attention of one layer. `rotation` is empty, or cos and sin; `window` 0 means none."""
    step = _steps[model]
    turned: Any = None
    if rotation:
        from stage04_kernels.features.rope import Rotation

        turned = Rotation(*rotation)
    attend, kv_cache = step.layers[layer], step.kv_caches[layer]
    return attend(query, key, value, kv_cache, step.metadata, scale, window or None, turned).contiguous()


@_paged_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, rotation: list[Tensor], scale: float, window: int, model: int, layer: int
) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


class _OneOperation:
    """In the place of a layer's attention backend."""

    def __init__(self, model: int, layer: int) -> None:
        self._model, self._layer = model, layer

    @property
    def within(self) -> Callable[..., Tensor]:
        """The attention that the operation calls; whoever stands in for it for a while puts its own here."""
        return _steps[self._model].layers[self._layer]

    @within.setter
    def within(self, own: Callable[..., Tensor]) -> None:
        _steps[self._model].layers[self._layer] = own

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: None, metadata: None, scale: float, window: int | None, rotation: Any
    ) -> Tensor:  # fmt: skip
        tensors = [] if rotation is None else [*rotation]
        out: Tensor = torch.ops.stages.paged_attention(
            query, key, value, tensors, scale, window or 0, self._model, self._layer
        )
        return out


class CompiledModelHook(RunnerHook):
    """Installed with a mode other than 0."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._settings = config.compilation_config
        if (folder := self._settings.cache_dir) is not None:
            try:
                os.makedirs(folder, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"compilation_config: cannot write to cache_dir {folder[:200]!r}: {error.strerror}"
                ) from None
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # read when Inductor is imported

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model; what it computes comes from graphs from now on, once they are made."""
        layers = [module for module in model.modules() if callable(getattr(module, "attention", None))]
        if self._settings.mode == WHOLE:
            model.forward = self._whole(model, layers)  # type: ignore[method-assign]
        else:
            for layer in layers:
                layer.attention = torch._dynamo.disable(layer.attention)
            model.forward = torch.compile(model.forward, dynamic=True, backend=self._settings.backend)  # type: ignore[method-assign]
        return model

    def _whole(self, model: LanguageModel, layers: list[Any]) -> Callable[..., Tensor]:
        # A layer's scale is a constant: as an input it would be a tensor, made anew in each step.
        torch._dynamo.config.specialize_float = True
        step, number, original, none = _Step(), len(_steps), model.forward, [None] * len(layers)
        _steps.append(step)
        for place, layer in enumerate(layers):
            step.layers.append(layer.attention)
            layer.attention = _OneOperation(number, place)

        def computed(input_ids: Tensor, positions: Tensor) -> Tensor:
            return original(input_ids, positions, none, None)  # type: ignore[arg-type]

        graph = torch.compile(computed, dynamic=True, fullgraph=True, backend=self._settings.backend)

        def forward(
            input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: AttentionMetadata
        ) -> Tensor:
            step.kv_caches, step.metadata = kv_caches, metadata
            hidden: Tensor = graph(input_ids, positions)
            return hidden

        return forward

    @torch.inference_mode()
    def cache_allocated(self, num_blocks: int) -> None:
        """Compile for one token, and for more, before a request comes. Raises ConfigError if torch.compile cannot."""
        from torch._dynamo.exc import TorchDynamoException
        from torch._dynamo.utils import counters

        runner = self.runner
        logger.info("torch.compile: %s", ", ".join(start_row(self.config)[1:]))
        started = time.monotonic()
        counters.clear()
        try:
            for length in (1, min(PROMPT_TOKENS, self.config.max_model_len)):
                inputs = dummy_inputs(runner.batch, [length], runner.device)
                runner.run_model(inputs)  # it writes to block 1, which nobody uses yet
        except TorchDynamoException as error:
            raise ConfigError(
                f"compilation_config: torch.compile cannot compile this model: {str(error).splitlines()[0]}"
            ) from error
        seconds, graphs = time.monotonic() - started, counters["stats"]["unique_graphs"]
        breaks = sum(counters["graph_break"].values())
        remember(self.config, seconds, graphs)
        logger.info(
            "torch.compile made %d graphs in %.1f s (mode %d, %s)",
            graphs,
            seconds,
            self._settings.mode,
            self._settings.backend,
        )
        if trace.on:
            mode, backend, took = self._settings.mode, self._settings.backend, round(seconds, 3)
            trace.emit("model.compiled", mode=mode, backend=backend, graphs=graphs, breaks=breaks, seconds=took)
