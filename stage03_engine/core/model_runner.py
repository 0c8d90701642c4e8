"""The model runner: from a scheduler's decision to sampled tokens (vllm/v1/worker/gpu_model_runner.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook, install
from stage03_engine.core.input_batch import InputBatch, StepInputs, prepare_inputs
from stage03_engine.core.kv_cache_size import head_layout
from stage03_engine.core.models.layers import LanguageModel
from stage03_engine.core.models.loader import get_model
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import TokenLogprobs
from stage04_kernels.sampler import SamplerOutput, SamplingMetadata, sample
from stagetrace import trace


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, but on a CPU a block takes no memory before it is first used: numpy gets zero pages from the operating
    system, where torch would write every byte (1.6 GB and half a second for gpt2-tiny's default cache)."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


class ModelRunner:
    """Holds the model, the KV cache and the persistent batch of one device. `hooks` is empty unless a setting or a request
    needs a feature that takes part in the step (hooks.py)."""

    model: LanguageModel
    sampler: Callable[[Tensor, SamplingMetadata, str], SamplerOutput] = staticmethod(sample)

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.model_config.dtype)
        self.block_size = config.cache_config.block_size
        self.batch = InputBatch(config.scheduler_config.max_num_seqs, config.max_model_len, self.block_size)
        self.kv_caches: list[Tensor] = []
        self.hooks: list[RunnerHook] = []
        install(config.hooks("runner"), self, config)

    def load_model(self) -> None:
        """Load the weights."""
        self.model = get_model(self.config, self.dtype, self.device, self.hooks)
        for hook in self.hooks:
            self.model = hook.model_loaded(self.model)

    def new_kv_caches(self, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One [2, num_blocks, block_size, num_kv_heads, head_dim] tensor per layer; a feature may hold heads in other sizes."""
        shape, (_, dtype, head_size) = self.config.shape, head_layout(self.config)
        size = (2, num_blocks, self.block_size, shape.num_kv_heads, head_size)
        return [zeros(size, getattr(torch, dtype), device) for _ in range(shape.num_layers)]

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self.kv_caches = self.new_kv_caches(num_blocks, self.device)
        if trace.on:
            num_bytes = sum(cache.nbytes for cache in self.kv_caches)
            trace.emit("kv_cache.allocated", num_blocks=num_blocks, block_size=self.block_size, bytes=num_bytes)
        for hook in self.hooks:
            hook.cache_allocated(num_blocks)

    # One step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Prepare the inputs, run the model over the scheduled tokens, sample for the requests that have caught up, collect."""
        for hook in self.hooks:
            scheduler_output = hook.received(scheduler_output)
        self._update_states(scheduler_output)
        output = ModelRunnerOutput({})
        if scheduler_output.num_scheduled_tokens:
            inputs = self._prepare_inputs(scheduler_output)
            hidden = self._forward(inputs, scheduler_output.step)
            sampled = self._sample(hidden, inputs, scheduler_output)
            if sampled is not None:
                self._collect(sampled, inputs, output)
        for hook in self.hooks:
            hook.collect(output, scheduler_output)
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring the persistent batch up to date with the scheduler."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self.batch.remove(request_id)
        for request_id, block_ids in scheduler_output.new_block_ids.items():
            if block_ids:
                self.batch.append_blocks(request_id, block_ids)
        for new in scheduler_output.scheduled_new_reqs:
            self.batch.add(new)
            install(new.sampling_params.hooks("runner"), self, self.config)
            for hook in self.hooks:
                hook.request_added(new)
        for hook in self.hooks:
            hook.batch_updated(scheduler_output)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Gather the scheduled tokens of all requests into one flat row."""
        inputs = prepare_inputs(self.batch, scheduler_output, self.device)
        for hook in self.hooks:
            hook.prepared(inputs, scheduler_output)
        if trace.on:
            metadata = inputs.metadata
            trace.emit(
                "runner.prepared", step=scheduler_output.step, num_reqs=len(metadata.seq_lens_cpu),
                num_tokens=len(inputs.positions), max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len,
            )  # fmt: skip
        return inputs

    def _forward(self, inputs: StepInputs, step: int) -> Tensor:
        """Hidden states [num_tokens, hidden_size]."""
        if trace.on:
            trace.emit("model.forward", ph="B", step=step, num_tokens=len(inputs.input_ids))
        run: Callable[[StepInputs], Tensor] = self.run_model
        for hook in reversed(self.hooks):
            run = partial(hook.forward, run=run)
        hidden = run(inputs)
        if trace.on:
            trace.emit("model.forward", ph="E", step=step, num_tokens=len(inputs.input_ids))
        return hidden

    def run_model(self, inputs: StepInputs) -> Tensor:
        """Hidden states, without the hooks."""
        hidden: Tensor = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        return hidden

    def _sample(self, hidden: Tensor, inputs: StepInputs, scheduler_output: SchedulerOutput) -> SamplerOutput | None:
        """The next token of each row of logits; None if there is none to sample."""
        done = [hook.after_forward(hidden, inputs, scheduler_output) for hook in self.hooks]
        if any(done) or not inputs.sampled:
            return None
        step = scheduler_output.step
        if len(inputs.sampled) < hidden.shape[0]:  # else it is all of them, in order
            hidden = hidden[inputs.logits_indices]
        logits: Tensor = self.model.compute_logits(hidden)
        if trace.on:
            trace.emit("model.logits", step=step, rows=logits.shape[0], vocab_size=logits.shape[1])
        for hook in self.hooks:
            logits = hook.logits(logits, inputs, scheduler_output)
        metadata = self.sampling_metadata(inputs)
        for hook in self.hooks:
            metadata = hook.sampling_metadata(metadata, inputs, scheduler_output)
        output = self.sampler(logits, metadata, self.config.device_config.attention_backend)
        if trace.on:
            num_random = len(metadata.random_rows)
            trace.emit("sampler.sampled", step=step, num_greedy=len(inputs.sampled) - num_random, num_random=num_random)
        return output

    def sampling_metadata(self, inputs: StepInputs) -> SamplingMetadata:
        """The settings of each row of logits."""
        batch = self.batch
        if not batch.with_settings:
            return SamplingMetadata.greedy(len(inputs.sampled), self.device)
        rows = np.array(inputs.sampled)
        of = {name: column[rows] for name, column in batch.settings.items()}
        most = int(of["num_likely_tokens"].max())
        asked = [batch.requests[row].sampling_params.logprob_token_ids for row in inputs.sampled] if most >= 0 else []
        return SamplingMetadata.from_lists(
            of["temperature"], of["top_k"], of["top_p"], of["min_p"], of["seed"].tolist(),
            (batch.num_tokens[rows] - of["num_prompt_tokens"] + inputs.ahead).tolist(),
            max_num_logprobs=most if most >= 0 else None,
            named={row: token_ids for row, token_ids in enumerate(asked) if token_ids is not None},
            device=self.device,
        )  # fmt: skip

    def _collect(self, output: SamplerOutput, inputs: StepInputs, collected: ModelRunnerOutput) -> None:
        """Copy the samples to the host (here the CPU waits for the device), append them to the batch, group them by request."""
        batch, sampled, token_ids = self.batch, collected.sampled_token_ids, output.sampled_token_ids.cpu().numpy()
        for row, token_id in zip(inputs.sampled, token_ids.tolist()):
            sampled.setdefault(batch.request_ids[row], []).append(token_id)
        for hook in self.hooks:
            hook.after_sample(sampled, output, inputs)
        if len(sampled) == len(token_ids):
            batch.append_token_each(inputs.sampled, token_ids)
        else:  # several rows of a request
            for request_id, accepted in sampled.items():
                batch.append_tokens(batch.row_of[request_id], accepted)
        if output.logprobs is not None:
            self._collect_logprobs(output, inputs, collected)

    def _collect_logprobs(self, output: SamplerOutput, inputs: StepInputs, collected: ModelRunnerOutput) -> None:
        """One entry per new token of each request that asks for them. The tensors are as wide as the widest of these requests,
        and hold rows after a rejected draft, which do not count."""
        assert output.logprob_token_ids is not None and output.logprobs is not None and output.ranks is not None
        values = (output.logprob_token_ids.tolist(), output.logprobs.tolist(), output.ranks.tolist())
        for row, ids, logprobs, rank in zip(inputs.sampled, *values):
            request_id, asked = self.batch.request_ids[row], self.batch.requests[row].sampling_params.num_logprobs
            if asked is None:
                continue
            entries = collected.logprobs.setdefault(request_id, [])
            if len(entries) < len(collected.sampled_token_ids[request_id]):
                entries.append(TokenLogprobs(ids[: asked + 1], logprobs[: asked + 1], rank))

    def shutdown(self) -> None:
        """Release the KV cache and the weights."""
        for hook in self.hooks:
            hook.shutdown()
        self.kv_caches, self.model = [], LanguageModel()
