"""Where adapters take part: in the hashes of blocks, and in the products of the linear layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.lora.adapter import Adapter, Pair, read_adapter
from stage03_engine.core.hooks import RunnerHook, SchedulerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel, Linear
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import InvalidRequestError
from stagetrace import trace


class LoRASchedulerHook(SchedulerHook):
    """Installed with `--enable-lora`. An adapter changes keys and values: its blocks are not those of the base model."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.numbers = set(range(1, len(config.lora_config.adapters()) + 1))  # of the adapters that are there
        self._waiting: dict[int, Callable[[], None]] = {}  # to be forgotten when no request has them

    def added(self, request: Request) -> None:
        """Its blocks are found again by requests with the same adapter only. Raises InvalidRequestError for one that is not there."""
        params = request.sampling_params
        if params.lora is not None:
            if params.lora_int_id not in self.numbers:
                raise InvalidRequestError(f"lora: the adapter {params.lora!r} has been unloaded.", "lora")
            request.add_hash_key(f"lora:{params.lora_int_id}")

    def when_unused(self, number: int, forget: Callable[[], None]) -> None:
        """Call `forget` as soon as no request has this adapter."""
        self._waiting[number] = forget
        self._forget_unused()

    def finished(self, request: Request) -> None:
        if self._waiting:
            self._forget_unused(request)

    def _forget_unused(self, ended: Request | None = None) -> None:
        used = {each.sampling_params.lora_int_id for each in self.scheduler.requests.values() if each is not ended}
        for number in self._waiting.keys() - used:
            self._waiting.pop(number)()


@dataclass
class Rows:
    """Which rows of the step's tokens belong to which adapter: (its name, their numbers; None: all of them). All layers share it."""

    groups: list[tuple[int, Tensor | None]] = field(default_factory=list)


class LowRankSum:
    """What the adapters add to one layer: an addend of `Linear`. Each adapter multiplies its own rows, so a batch of several costs
    two small products for each of them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.pairs: dict[int, Pair] = {}  # adapter -> its pair for this layer

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [num_tokens, in_features], y: [num_tokens, out_features]."""
        for name, rows in self._rows.groups:
            if (pair := self.pairs.get(name)) is None:
                continue
            if rows is None:
                y = y + (x @ pair.a.T) @ pair.b.T
            else:
                y = y.index_add(0, rows, (x[rows] @ pair.a.T) @ pair.b.T)
        return y


class LoRARunnerHook(RunnerHook):
    """Installed with `--enable-lora`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._rows = Rows()

    @torch.inference_mode()
    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, whose linear layers add the pairs of all adapters of `--lora-modules`."""
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        self._sums = {name: LowRankSum(self._rows) for name in self._layers}
        for name, layer in self._layers.items():
            layer.addends.append(self._sums[name])
        for number, (name, folder) in enumerate(self.config.lora_config.adapters().items(), start=1):
            self.add(number, name, folder)
        return model

    @torch.inference_mode()
    def add(self, number: int, name: str, folder: str) -> None:
        """Raises ConfigError."""
        started, rank = time.monotonic(), self.config.lora_config.max_lora_rank
        adapter = read_adapter(name, Path(folder), self._layers, rank, self.runner.dtype, self.runner.device)
        for layer, pair in adapter.pairs.items():
            self._sums[layer].pairs[number] = pair
        self._trace_loaded(adapter, time.monotonic() - started)

    def remove(self, number: int) -> None:
        """Forget an adapter."""
        for each in self._sums.values():
            each.pairs.pop(number, None)

    def _trace_loaded(self, adapter: Adapter, seconds: float) -> None:
        if trace.on:
            trace.emit(
                "lora.loaded", adapter=adapter.name, rank=adapter.rank, layers=len(adapter.pairs),
                bytes=adapter.num_bytes, seconds=round(seconds, 4),
            )  # fmt: skip

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Group the rows of this step by adapter."""
        batch, counts = self.runner.batch, scheduler_output.num_scheduled_tokens
        params = [batch.requests[batch.row_of[request_id]].sampling_params for request_id in counts]
        names = [each.lora_int_id or None for each in params]
        used = dict.fromkeys(name for name in names if name is not None)
        if len(used) == 1 and None not in names:
            self._rows.groups = [(name, None) for name in used]
        else:
            numbers = {name: number for number, name in enumerate(used)}
            owner = np.repeat([numbers.get(name, -1) for name in names], list(counts.values()))
            at = {name: torch.from_numpy(np.flatnonzero(owner == number)) for name, number in numbers.items()}
            self._rows.groups = [(name, rows.to(self.runner.device)) for name, rows in at.items()]
        inputs.replayable = not used
        if trace.on and used:
            rows_of = dict[str, int]()
            for each, count in zip(params, counts.values(), strict=True):
                if each.lora is not None:
                    rows_of[each.lora] = rows_of.get(each.lora, 0) + count
            trace.emit("lora.rows", step=scheduler_output.step, rows=rows_of)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """The step is over; whatever else runs the model means the base model."""
        self._rows.groups = []
        return False
