"""Cascade attention in the model runner: which steps take it (vllm/v1/worker/gpu_model_runner.py, _compute_cascade_attn_prefix_lens)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.memory_profile.memory_profile import dummy_inputs
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.models.layers import LanguageModel
from stage04_kernels.features.cascade_attention import plan as rule
from stage04_kernels.features.cascade_attention.triton_kernels import with_cascade
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.sched_output import SchedulerOutput


class CascadeHook(RunnerHook):
    """Installed with the Triton kernels, without `--disable-cascade-attn`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._recorded = not getattr(config.device_config, "enforce_eager", True)

    def model_loaded(self, model: LanguageModel) -> LanguageModel:
        """The same model; its layers read what is shared once, in steps that have a plan for it."""
        for layer in model.modules():
            if callable(own := getattr(layer, "attention", None)):
                layer.attention = with_cascade(own)  # type: ignore[assignment]
        return model

    @torch.inference_mode()
    def cache_allocated(self, num_blocks: int) -> None:
        """On a GPU the kernels are compiled before the first request: for two that share a block."""
        runner = self.runner
        if runner.device.type != "cuda" or not runner.kv_caches:
            return
        size = runner.block_size
        for length in (1, min(32, runner.config.max_model_len - size)):
            inputs = dummy_inputs(runner.batch, [length, length], runner.device)
            metadata = inputs.metadata
            table = metadata.block_table.cpu().numpy()  # every entry is block 1
            metadata.seq_lens_cpu = [length + size] * 2
            metadata.seq_lens += size
            metadata.max_seq_len += size
            prefixes = [rule.SharedPrefix([0, 1], 1)]
            metadata.plans[rule.KEY] = rule.make_plan(prefixes, table, metadata, size)
            runner.model(inputs.input_ids, inputs.positions, runner.new_kv_caches(2, runner.device), metadata)

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Does this step read blocks together? Then no recording of the model computes it."""
        metadata, batch, size = inputs.metadata, self.runner.batch, self.runner.block_size
        if len(metadata.seq_lens_cpu) < rule.MIN_REQUESTS or not self.runner.kv_caches:
            return
        table = batch.block_table[[batch.row_of[request_id] for request_id in scheduler_output.num_scheduled_tokens]]
        computed = np.array(metadata.seq_lens_cpu) - np.diff(metadata.query_start_loc_cpu)
        prefixes = rule.find_shared_prefixes(table, computed, size, rule.MIN_REQUESTS, rule.MIN_TOKENS)
        saved = rule.saved_bytes(prefixes, self.runner.kv_caches[0][:, 0].nbytes)
        if not prefixes or saved < self._least(metadata.max_query_len):
            return
        metadata.plans[rule.KEY] = rule.make_plan(prefixes, table, metadata, size)
        inputs.replayable = False
        if trace.on:
            tokens, members = [p.num_blocks * size for p in prefixes], [len(p.requests) for p in prefixes]
            trace.emit(
                "attention.cascade", step=scheduler_output.step, requests=members, shared_tokens=tokens, saved_bytes=saved
            )  # fmt: skip

    def _least(self, max_query_len: int) -> int:
        """What a layer must save; under the interpreter, which pays per program, nothing."""
        if self.runner.device.type != "cuda":
            return 0
        replayed = self._recorded and max_query_len == 1
        return rule.RECORDING_BYTES if replayed else rule.LAUNCHES_BYTES
