"""Rows that take the place of token embeddings in a step (vllm/v1/worker/gpu_model_runner.py, inputs_embeds).

The model files know nothing of it. Each of these positions gets a token id beyond the vocabulary, a number of its own; around the embedding, such ids become 0 and
their rows what was put there. So it does not matter in which pieces the embedding is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn

from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner

BEYOND = 1 << 40  # greater than any token id


class EmbeddingRows:
    """Those of one model runner, whichever features put them there: in `prepared`, while `run` is called in `forward`, by each of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = proxy(runner)  # which owns this object in `_of`, and may end
        self._places: list[tuple[int, Tensor]] = []  # of this step: index of a token, and the rows from there on
        self._around: nn.Module | None = None  # the embedding that is watched
        self._values = self._here = self._numbers = torch.empty(0)

    @staticmethod
    def of(runner: ModelRunner) -> EmbeddingRows:
        """Ids beyond the vocabulary are numbered once in a step, so there is one object for all."""
        if runner not in _of:
            _of[runner] = EmbeddingRows(runner)
        return _of[runner]

    def put(self, inputs: StepInputs, first: int, rows: Tensor) -> None:
        """`rows` [count, hidden_size] instead of the embeddings of the step's tokens from index `first` on."""
        inputs.replayable = False  # a recorded step reads token embeddings alone
        self._places.append((first, rows))

    def run(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """Run the model over ids that say which rows are which."""
        if not self._places:
            return run(inputs)
        self._watch()
        ids, known = inputs.input_ids.clone(), BEYOND
        for first, rows in self._places:
            ids[first : first + len(rows)] = torch.arange(known, known + len(rows), device=ids.device)
            known += len(rows)
        self._values = torch.cat([rows for _, rows in self._places])
        self._places = []
        return run(replace(inputs, input_ids=ids))

    def _watch(self) -> None:
        """Around the embedding of the model that runs now: it may have been loaded again."""
        modules = reversed(list(self._runner.model.named_modules()))
        named = {name.rpartition(".")[2]: module for name, module in modules}
        embedding = named.get("wte", named.get("embed_tokens"))
        assert embedding is not None, "a model without an embedding"
        if embedding is not self._around:
            embedding.register_forward_pre_hook(self._before)
            embedding.register_forward_hook(self._after)
            self._around = embedding

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Ids that the embedding knows."""
        self._here = args[0] >= BEYOND
        self._numbers = args[0][self._here] - BEYOND
        return (args[0].masked_fill(self._here, 0), *args[1:]) if len(self._numbers) else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor | None:
        """What was put in their places."""
        if not len(self._numbers):
            return None
        x = x.clone()
        x[self._here] = self._values[self._numbers]
        return x


_of: WeakKeyDictionary[ModelRunner, EmbeddingRows] = WeakKeyDictionary()
