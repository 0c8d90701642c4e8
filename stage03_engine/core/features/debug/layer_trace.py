"""`--trace-layers`: embeddings, attention, KV write and MLP of each layer, and the final norm, as spans in the trace. vLLM has no
counterpart.

The model files know nothing of it: torch hooks on their modules emit the events, and without the flag there are no hooks. On a GPU a
span ends when its kernels are launched, not when they are done.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import SchedulerOutput
from stage04_kernels.paged_attention import write_then_attend
from stagetrace import trace

_EMBEDDING = re.compile(r"(?:^|\.)(?:wte|embed_tokens)$")
_POSITIONS = re.compile(r"(?:^|\.)wpe$")  # Llama has none: it rotates queries and keys
_FINAL_NORM = re.compile(r"(?:^|\.)(?:ln_f|norm)$")
_LAYER = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)(?:\.(attn|self_attn|mlp))?$")  # of gpt2.py and llama.py


class LayerTraceHook(RunnerHook):
    """Installed with `--trace-layers`. `step` is the current engine step; None while the model is only measured."""

    step: int | None = None

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """The step that the spans of the next forward pass belong to."""
        self.step = scheduler_output.step

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """Put hooks of torch on its modules. A pipeline stage has its own part of the layers, and perhaps neither embedding nor final norm:
        their placeholders there are no part of the model."""
        shape = self.config.shape
        first, whole = getattr(shape, "first_layer", 0), getattr(shape, "whole", None) or shape
        has_final_norm = first + shape.num_layers == whole.num_layers
        for name, module in model.named_modules():
            if match := _LAYER.search(name):
                self._watch(module, first + int(match[1]), match[2])
            elif _FINAL_NORM.search(name) and has_final_norm:
                module.register_forward_pre_hook(lambda *_: self._final_norm("B"))
                module.register_forward_hook(lambda *_: self._final_norm("E"))
            elif first > 0:
                continue
            elif _EMBEDDING.search(name):
                module.register_forward_pre_hook(self._embedding_begins)
            elif _POSITIONS.search(name):
                module.register_forward_pre_hook(lambda *_: self._positions("B"))
                module.register_forward_hook(lambda *_: self._positions("E"))
        return model

    def _watch(self, module: nn.Module, layer: int, part: str | None) -> None:
        if part is None:
            if layer == 0:
                module.register_forward_pre_hook(self._embedding_ends)
        elif part == "mlp":
            module.register_forward_pre_hook(lambda *_: self._mlp("B", layer))
            module.register_forward_hook(lambda *_: self._mlp("E", layer))
        else:
            module.register_forward_pre_hook(lambda *_: self._attention("B", layer))
            module.register_forward_hook(lambda *_: self._attention("E", layer))
            if parts := getattr(module.attention, "parts", None):
                write, attend = parts
                module.attention = write_then_attend(self._traced(write, layer), attend)  # type: ignore[assignment]

    def _traced(self, write: Callable[..., None], layer: int) -> Callable[..., None]:
        """`write`, which stores keys and values in the cache, as a span."""

        def traced_write(*tensors: Tensor) -> None:
            self._kv_write("B", layer)
            write(*tensors)
            self._kv_write("E", layer)

        return traced_write

    def _kv_write(self, ph: str, layer: int) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.kv_write", ph=ph, step=self.step, layer=layer)

    def _positions(self, ph: str) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.positional_embedding", ph=ph, step=self.step)

    def _final_norm(self, ph: str) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.final_norm", ph=ph, step=self.step)

    def _embedding_begins(self, *_: Any) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.embedding", ph="B", step=self.step)

    def _embedding_ends(self, *_: Any) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.embedding", ph="E", step=self.step)

    def _attention(self, ph: str, layer: int) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.attention", ph=ph, step=self.step, layer=layer)

    def _mlp(self, ph: str, layer: int) -> None:
        if trace.on and self.step is not None:
            trace.emit("model.mlp", ph=ph, step=self.step, layer=layer)
