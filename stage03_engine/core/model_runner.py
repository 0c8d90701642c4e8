"""The model runner: from a scheduler's decision to sampled tokens (vllm/v1/worker/gpu_model_runner.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.batch_invariant.batch_invariant import make_batch_invariant
from stage03_engine.core.features.cuda_graphs.cuda_graphs import DecodeGraphs
from stage03_engine.core.features.debug.layer_trace import LayerTrace
from stage03_engine.core.features.debug.sampler_trace import trace_sampling
from stage03_engine.core.features.logits_processor.logits_processor import LogitsRow, load_logits_processors, transforms
from stage03_engine.core.features.pooling.pooler import Pooler
from stage03_engine.core.features.prompt_logprobs import prompt_logprobs
from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer
from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.logits_rules import make_rules
from stage03_engine.core.models.loader import get_model
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.step_inputs import StepInputs, dummy_inputs, prepare_inputs, to_device
from stage03_engine.messages import TokenLogprobs
from stage04_kernels.features.bitmask import apply_token_bitmask
from stage04_kernels.features.rejection_sampler import num_accepted
from stage04_kernels.sampler import RowsTransform, SamplerOutput, SamplingMetadata, sample
from stagetrace import trace

CPU_PROFILE_TOKENS = 256


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros, but on a CPU a block costs no memory before it is first used: numpy takes the operating system's own
    zero pages, where torch would write every byte (1.6 GB and half a second for gpt2-tiny's default cache)."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


class ModelRunner:
    """Holds the model, the KV cache and the persistent batch of one device."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.model_config.dtype)
        self.block_size = config.cache_config.block_size
        self.batch = InputBatch(
            config.scheduler_config.max_num_seqs, config.max_model_len, self.block_size, config.shape.vocab_size
        )
        self.logits_processors = load_logits_processors(config, device)
        speculative = config.speculative_config
        # A user's own logits processor may look at the tokens before a position, which for a draft are not certain.
        drafts = speculative.method == "ngram" and not self.logits_processors
        self.proposer = NgramProposer(speculative) if drafts else None
        self.kv_caches: list[Tensor] = []
        self.swap_caches: list[Tensor] = []  # CPU memory for preempted requests, like kv_caches
        self.graphs: DecodeGraphs | None = None  # recorded by `capture_graphs`, on a GPU
        self.model: nn.Module
        self.layer_trace: LayerTrace | None = None
        self.pooler = Pooler(config) if config.is_pooling else None

    def load_model(self) -> None:
        """Load the weights."""
        self.model = get_model(self.config, self.dtype, self.device)
        if self.config.device_config.batch_invariant:
            self.model = make_batch_invariant(self.model, self.config, self.dtype, self.device)
        if self.config.observability_config.trace_layers:
            self.layer_trace = LayerTrace(self.model)

    def initialize_kv_cache(self, num_blocks: int, num_swap_blocks: int = 0) -> None:
        """Allocate one [2, num_blocks, block_size, num_kv_heads, head_dim] tensor per layer, and the like in CPU memory."""
        shape = self.config.shape
        size, swap_size = (
            (2, count, self.block_size, shape.num_kv_heads, shape.head_dim) for count in (num_blocks, num_swap_blocks)
        )
        self.kv_caches = [_zeros(size, self.dtype, self.device) for _ in range(shape.num_layers)]
        cpu = torch.device("cpu")
        self.swap_caches = [_zeros(swap_size, self.dtype, cpu) for _ in range(shape.num_layers)]
        if trace.on:
            num_bytes = sum(cache.numel() * cache.element_size() for cache in self.kv_caches)
            trace.emit("kv_cache.allocated", num_blocks=num_blocks, block_size=self.block_size, bytes=num_bytes)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record decode steps as CUDA graphs, once the KV cache is in place."""
        device = self.config.device_config
        wanted = device.attention_backend == "triton" and not device.enforce_eager and self.layer_trace is None
        if self.device.type == "cuda" and wanted:  # a graph runs no hooks of the layers
            max_blocks, max_num_seqs = self.batch.block_table.shape[1], self.config.scheduler_config.max_num_seqs
            lengths = (max_blocks, self.config.max_model_len)
            self.graphs = DecodeGraphs(self.model, self.kv_caches, *lengths, max_num_seqs, self.device)

    # Measuring

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Run the largest step that the scheduler may ask for, on a throw-away cache, so that its memory shows.

        It is one request after another of the longest context, as many as fill the token budget; logits for as many rows
        as there can be requests. On a CPU a short step must do: the full one takes seconds of start-up there, to measure a
        few megabytes.
        """
        scheduler_config, max_len = self.config.scheduler_config, self.config.max_model_len
        budget = min(scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs * max_len)
        if self.device.type == "cpu":
            budget = min(budget, CPU_PROFILE_TOKENS)
        lengths = [max_len] * (budget // max_len) + [budget % max_len] * (budget % max_len > 0)
        self.initialize_kv_cache(2)
        inputs = dummy_inputs(self.batch, lengths, self.device)
        hidden = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        logits_per_request = 1 + self.config.speculative_config.num_speculative_tokens
        rows = min(budget, scheduler_config.max_num_seqs * logits_per_request)
        logits = self.model.compute_logits(hidden[:rows])  # type: ignore[operator]
        metadata = SamplingMetadata.from_lists(
            [0.0] * rows, [0] * rows, [1.0] * rows, [0.0] * rows, [0] * rows, [0] * rows
        )
        sample(logits, metadata)
        self.kv_caches = []

    # One step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the deltas, run the model over the scheduled tokens, sample for the requests that have caught up."""
        self._update_states(scheduler_output)
        if scheduler_output.blocks_to_swap_out or scheduler_output.blocks_to_swap_in:
            self._swap_blocks(scheduler_output.blocks_to_swap_out, scheduler_output.blocks_to_swap_in)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput({})
        step = scheduler_output.step
        inputs = self._prepare_inputs(scheduler_output)
        if self.layer_trace is not None:
            self.layer_trace.step = step
        if trace.on:
            trace.emit("model.forward", ph="B", step=step, num_tokens=len(inputs.input_ids))
        if self.graphs is not None and self.graphs.fits(inputs.metadata):
            hidden = self.graphs.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        else:
            hidden = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        if trace.on:
            trace.emit("model.forward", ph="E", step=step, num_tokens=len(inputs.input_ids))
        compute_logits: Callable[[Tensor], Tensor] = self.model.compute_logits  # type: ignore[assignment]
        if self.pooler is not None:
            return ModelRunnerOutput({}, pooled=self.pooler.pool(self.batch, scheduler_output, hidden, compute_logits))
        of_prompts = prompt_logprobs(self.batch, scheduler_output.num_scheduled_tokens, hidden, compute_logits)
        if not inputs.sampled:
            return ModelRunnerOutput({}, prompt_logprobs=of_prompts)
        logits = compute_logits(hidden[inputs.logits_indices])
        if trace.on:
            trace.emit("model.logits", step=step, rows=logits.shape[0], vocab_size=logits.shape[1])
        rows = [row for row, draft in zip(inputs.sampled, inputs.drafts) for _ in range(len(draft) + 1)]
        ahead = [place for draft in inputs.drafts for place in range(len(draft) + 1)]
        if scheduler_output.grammar_bitmask:
            logits = self._apply_grammar_bitmask(logits, rows, scheduler_output.grammar_bitmask)
        metadata = self._sampling_metadata(rows, ahead)
        if trace.on:
            trace_sampling(self.batch, rows, metadata, self.logits_processors, scheduler_output)
        output = sample(logits, metadata, self.config.device_config.attention_backend)
        if trace.on:
            num_random = len(metadata.random_rows)
            trace.emit("sampler.sampled", step=step, num_greedy=len(rows) - num_random, num_random=num_random)
        collected = self._collect(inputs, output)
        collected.prompt_logprobs = of_prompts
        if self.proposer is not None:
            collected.draft_token_ids = self.proposer.propose_batch(self.batch, inputs.sampled, step)
        return collected

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring the persistent batch up to date with the scheduler."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self.batch.remove(request_id)
        for request_id, block_ids in scheduler_output.new_block_ids.items():
            if block_ids:
                self.batch.append_blocks(request_id, block_ids)
        for new in scheduler_output.scheduled_new_reqs:
            self.batch.add(new)
        if self.pooler is not None:
            self.pooler.update(scheduler_output)

    def _swap_blocks(self, out: list[tuple[int, int]], back: list[tuple[int, int]]) -> None:
        """Copy whole blocks: first out, because this step may write to the blocks that are left, then back in."""
        for pairs, sources, targets in (
            (out, self.kv_caches, self.swap_caches),
            (back, self.swap_caches, self.kv_caches),
        ):
            for source, target in zip(sources, targets):
                for source_block, target_block in pairs:
                    target[:, target_block].copy_(source[:, source_block])
        if trace.on:
            trace.emit("kv.swapped", num_out=len(out), num_in=len(back))

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """The scheduled tokens of all requests in one flat row."""
        inputs = prepare_inputs(self.batch, scheduler_output, self.device)
        metadata = inputs.metadata
        if self.config.scheduler_config.check_invariants:
            assert len(metadata.slot_mapping.unique()) == len(inputs.positions), "a slot is written twice in one step"
        if trace.on:
            trace.emit(
                "runner.prepared", step=scheduler_output.step, num_reqs=len(metadata.seq_lens_cpu),
                num_tokens=len(inputs.positions), max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len,
            )  # fmt: skip
        return inputs

    def _apply_grammar_bitmask(self, logits: Tensor, rows: list[int], masks: dict[str, bytes]) -> Tensor:
        """Forbid what a request's grammar forbids; rows of logits of requests without one stay as they are."""
        ids = [self.batch.request_ids[row] for row in rows]
        constrained = np.array([i for i, request_id in enumerate(ids) if request_id in masks])
        words = np.frombuffer(b"".join(masks[ids[i]] for i in constrained), dtype=np.int32).copy()
        bitmask = to_device(words.reshape(len(constrained), -1), self.device)
        return apply_token_bitmask(logits, bitmask, to_device(constrained, self.device))

    def _sampling_metadata(self, rows: list[int], ahead: list[int]) -> SamplingMetadata:
        """The settings of each row of logits: `rows` are their requests, `ahead` how many drafts come before."""
        requests = [self.batch.rows[row] for row in rows]
        params = [request.sampling_params for request in requests]
        before, after_temperature = self._custom_transforms(rows) if self.logits_processors else ([], [])
        return SamplingMetadata.from_lists(
            [0.0 if p.greedy else p.temperature for p in params],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [request.seed for request in requests],
            [
                int(self.batch.num_tokens[r]) + a - request.num_prompt_tokens
                for r, a, request in zip(rows, ahead, requests)
            ],
            max_num_logprobs=max((k for p in params if (k := p.num_likely_tokens) is not None), default=None),
            named={i: p.logprob_token_ids for i, p in enumerate(params) if p.logprob_token_ids is not None},
            device=self.device,
            rules=make_rules([(self.batch.rows[row].rules, *self.batch.tokens_of(row)) for row in rows], self.device),
            before=before,
            after_temperature=after_temperature,
        )

    def _custom_transforms(self, rows: list[int]) -> tuple[list[RowsTransform], list[RowsTransform]]:
        batch = self.batch
        of_rows = [
            LogitsRow(batch.request_ids[row], batch.rows[row].sampling_params, *batch.tokens_of(row)) for row in rows
        ]
        return transforms(self.logits_processors, of_rows)

    def _collect(self, inputs: StepInputs, output: SamplerOutput) -> ModelRunnerOutput:
        """Bring the samples to the host (here the CPU waits for the device), remember them, name them by request."""
        batch = self.batch
        accepted = num_accepted(output.sampled_token_ids, inputs.drafts)
        token_ids = output.sampled_token_ids.tolist()
        logprobs = self._logprobs_to_host(output)
        collected = ModelRunnerOutput({})
        start = 0  # of the request's rows of logits
        for row, draft, num_kept in zip(inputs.sampled, inputs.drafts, accepted):
            end = start + num_kept + 1
            batch.rewind(row, len(draft) - num_kept)
            for token_id in token_ids[start:end]:
                if batch.num_tokens[row] < batch.max_model_len:
                    batch.append_token(row, token_id)
            collected.sampled_token_ids[batch.request_ids[row]] = token_ids[start:end]
            asked = batch.rows[row].sampling_params.num_logprobs
            if asked is not None:  # the tensors are as wide as the most demanding request
                collected.logprobs[batch.request_ids[row]] = [
                    TokenLogprobs(ids[: asked + 1], values[: asked + 1], rank)
                    for ids, values, rank in logprobs[start:end]
                ]
            start += len(draft) + 1
        return collected

    def _logprobs_to_host(self, output: SamplerOutput) -> list[tuple[list[int], list[float], int]]:
        """Token ids, log-probabilities and rank of each row of logits; empty when nobody asked."""
        if output.logprobs is None or output.logprob_token_ids is None or output.ranks is None:
            return []
        return list(zip(output.logprob_token_ids.tolist(), output.logprobs.tolist(), output.ranks.tolist()))

    def shutdown(self) -> None:
        """Release the KV cache and the weights."""
        self.kv_caches, self.model, self.graphs = [], nn.Module(), None
