"""Adapters in the model runner: which rows of a step use which place, and what the linear layers add for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.lora.messages import CHANGES, REPORT, Report
from stage03_engine.core.features.lora.places import AdapterPlaces, LowRankSum, Rows
from stage03_engine.core.features.lora.slices import linear_layers
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError
from stage04_kernels.features.lora import NO_PLACE, RowGroups, low_rank_kernel
from stagetrace import trace


class LoRARunnerHook(RunnerHook):
    """Installed with `--enable-lora`."""

    adapters: AdapterPlaces

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._rows = Rows()
        # Request -> its adapter's number and name. In a pipeline, the batch of most stages has plain settings only.
        self._adapter_of: dict[str, tuple[int, str]] = {}
        self._failed: dict[int, str] = {}  # of this step
        self._place_of: np.ndarray | None = None  # of the rows of the step, where recorded calls read it

    @torch.inference_mode()
    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model, whose linear layers have places for pairs. The adapters of `--lora-modules` are read. Raises ConfigError."""
        lora, runner = self.config.lora_config, self.runner
        dtype = runner.dtype if lora.lora_dtype == "auto" else getattr(torch, lora.lora_dtype)
        layers = linear_layers(model, self.config.shape)
        kernel = low_rank_kernel(self.config.device_config.attention_backend, runner.dtype, dtype)
        options: dict[str, Any] = {"dtype": dtype, "device": runner.device}
        sums = {}
        for name, own in layers.items():
            sums[name] = LowRankSum(own, self._rows, (lora.max_loras, lora.max_lora_rank), options, kernel)
            own.layer.addends.append(sums[name])
        sizes = (lora.max_loras, lora.max_cpu_loras or lora.max_loras, lora.max_lora_rank)
        self.adapters = AdapterPlaces(layers, sums, sizes, dtype, self.config.shape)
        for each in lora.adapters():
            self.adapters.add(*each)
        if kernel.recordable:  # until the first step; what is recorded meanwhile reads `place_of` when it is replayed
            self._place_of = np.full(self.config.scheduler_config.max_num_batched_tokens, NO_PLACE, dtype=np.int64)
            self._rows.groups, self._rows.recorded = RowGroups.of(self._place_of), True
        return model

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Adapters come and go, and the requests that have one."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._adapter_of.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if (name := new.sampling_params.lora) is not None:
                self._adapter_of[new.request_id] = new.sampling_params.lora_int_id, name
        changes = CHANGES.of(scheduler_output.extras)
        if changes is not None:
            for number in changes.remove:
                self.adapters.remove(number)
            for number, *source in changes.add:
                try:
                    self.adapters.add(number, *source)
                except ConfigError as error:
                    self._failed[number] = str(error)
            self.adapters.pinned.update(changes.pin)
        return scheduler_output

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Bring the step's adapters into their places, and note which rows use them."""
        counts = scheduler_output.num_scheduled_tokens
        numbers = [self._adapter_of[request_id][0] if request_id in self._adapter_of else 0 for request_id in counts]
        used = dict.fromkeys(number for number in numbers if number)
        self._rows.groups, self._rows.recorded = None, False
        if self._place_of is not None:
            self._place_of.fill(NO_PLACE)
        if not used:
            return
        inputs.replayable = self._place_of is not None
        in_batch = {number for number, _ in self._adapter_of.values()}
        self._failed |= self.adapters.ensure(used, in_batch)
        places = [self.adapters.places.get(number, NO_PLACE) if number else NO_PLACE for number in numbers]
        place_of = np.repeat(places, list(counts.values()))
        if self._place_of is not None:
            self._place_of[: len(place_of)] = place_of
            place_of = self._place_of[: len(place_of)]
        self._rows.groups = RowGroups.of(place_of, self.runner.device)
        if trace.on:
            names, rows_of = dict(self._adapter_of.values()), dict[str, int]()
            for number, count in zip(numbers, counts.values(), strict=True):
                if number:
                    rows_of[names[number]] = rows_of.get(names[number], 0) + count
            trace.emit("lora.rows", step=scheduler_output.step, rows=rows_of)

    def after_forward(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> bool:
        """The step is over; whatever else runs the model means the base model."""
        self._rows.groups = None
        return False

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Tell the scheduler what could not be read."""
        if self._failed:
            REPORT.put(output.extras, Report(self._failed))
            self._failed = {}
