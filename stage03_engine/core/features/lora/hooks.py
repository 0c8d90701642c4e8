"""Where adapters take part: in the hashes of blocks, and in the products of the linear layers."""

from __future__ import annotations

import time
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
from stagetrace import trace


class LoRASchedulerHook(SchedulerHook):
    """Installed with `--enable-lora`. An adapter changes keys and values: its blocks are not those of the base model."""

    def added(self, request: Request) -> None:
        """Its blocks are found again by requests with the same adapter only."""
        if request.sampling_params.lora is not None:
            request.add_hash_key(f"lora:{request.sampling_params.lora}")


@dataclass
class Rows:
    """Which rows of the step's tokens belong to which adapter: (its name, their numbers; None: all of them). All layers share it."""

    groups: list[tuple[str, Tensor | None]] = field(default_factory=list)


class LowRankSum:
    """What the adapters add to one layer: an addend of `Linear`. Each adapter multiplies its own rows, so a batch of several costs
    two small products for each of them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.pairs: dict[str, Pair] = {}  # adapter -> its pair for this layer

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
        layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        lora, sums = self.config.lora_config, dict[str, LowRankSum]()
        for name, folder in lora.adapters().items():
            started = time.monotonic()
            adapter = read_adapter(
                name, Path(folder), layers, lora.max_lora_rank, self.runner.dtype, self.runner.device
            )
            for layer, pair in adapter.pairs.items():
                if layer not in sums:
                    sums[layer] = LowRankSum(self._rows)
                    layers[layer].addends.append(sums[layer])
                sums[layer].pairs[name] = pair
            self._trace_loaded(adapter, time.monotonic() - started)
        return model

    def _trace_loaded(self, adapter: Adapter, seconds: float) -> None:
        if trace.on:
            trace.emit(
                "lora.loaded", adapter=adapter.name, rank=adapter.rank, layers=len(adapter.pairs),
                bytes=adapter.num_bytes, seconds=round(seconds, 4),
            )  # fmt: skip

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Group the rows of this step by adapter."""
        batch, counts = self.runner.batch, scheduler_output.num_scheduled_tokens
        names = [batch.requests[batch.row_of[request_id]].sampling_params.lora for request_id in counts]
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
            rows_of = dict.fromkeys(used, 0)
            for name, count in zip(names, counts.values(), strict=True):
                if name is not None:
                    rows_of[name] += count
            trace.emit("lora.rows", step=scheduler_output.step, rows=rows_of)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """The step is over; whatever else runs the model means the base model."""
        self._rows.groups = []
        return False
