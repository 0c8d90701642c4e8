"""How much memory the largest step takes, before the KV cache gets the rest (vllm/v1/worker/gpu_model_runner.py, profile_run)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from stage03_engine.core.input_batch import InputBatch, StepInputs, make_metadata
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.mixins import is_there
from stage04_kernels.sampler import SamplingMetadata, sample, to_device

if TYPE_CHECKING:
    from stage04_kernels.features.logits_processors import LogitsRules

CPU_PROFILE_TOKENS = 256
MAX_LOGPROBS = 20


def measure_activations(runner: ModelRunner) -> int:
    """Run the largest step. Returns the bytes that it took at its peak and that the device now counts as free again, and what
    hooks will take later.

    On a CPU that is 0: the allocator keeps the memory of a step's activations, so the free memory already lacks it. So would a GPU's
    allocator, but there it gives the memory back: counted twice, it would be missing from the KV cache.
    """
    if runner.device.type != "cuda":
        profile_run(runner)
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    profile_run(runner)
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak + sum(hook.reserved_bytes() for hook in runner.hooks)


@torch.inference_mode()
def profile_run(runner: ModelRunner) -> None:
    """Run the largest step that the scheduler may ask for, on a throw-away cache, so that its memory shows.

    It is one request after another of the longest context, as many as fill the token budget; logits for as many rows
    as there can be requests, sampled with everything on. On a CPU a short step and greedy must do: the full one takes seconds of
    start-up there, to measure a few megabytes.
    """
    scheduler_config, max_len = runner.config.scheduler_config, runner.config.max_model_len
    budget = min(scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs * max_len)
    if runner.device.type == "cpu":
        budget = min(budget, CPU_PROFILE_TOKENS)
    lengths = [max_len] * (budget // max_len) + [budget % max_len] * (budget % max_len > 0)
    kv_caches = runner.new_kv_caches(2, runner.device)
    inputs = dummy_inputs(runner.batch, lengths, runner.device)
    hidden = runner.model(inputs.input_ids, inputs.positions, kv_caches, inputs.metadata)
    rows_per_request = max((hook.rows_per_request for hook in runner.hooks), default=1)
    rows = min(budget, scheduler_config.max_num_seqs * rows_per_request)
    logits = runner.model.compute_logits(hidden[:rows])
    everything = runner.device.type != "cpu"
    most_likely = MAX_LOGPROBS if everything else None
    shape = (logits.shape[0], logits.shape[1])
    metadata = sampling_settings(*shape, runner.device, everything, everything, most_likely)
    sample(logits, metadata, runner.config.device_config.attention_backend)


def sampling_settings(
    rows: int, vocab: int, device: torch.device, filtered: bool, penalised: bool, num_logprobs: int | None
) -> SamplingMetadata:
    """Every row draws through top-k, top-p and min-p, or is greedy; with penalties or without."""
    zeros, rules = [0] * rows, penalties_of_all(rows, vocab, device) if penalised else None
    temperature, top_k, top_p, min_p = (1.0, vocab, 0.9, 0.01) if filtered else (0.0, 0, 1.0, 0.0)
    columns = ([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows)
    return SamplingMetadata.from_lists(*columns, zeros, zeros, num_logprobs, device, rules)


def penalties_of_all(rows: int, vocab: int, device: torch.device) -> LogitsRules | None:
    """A penalty for every row; None without the feature that has penalties."""
    if not is_there("stage04_kernels.features.logits_processors"):
        return None
    from stage04_kernels.features.logits_processors import LogitsRules, Penalties

    seen, factors = torch.zeros(rows, vocab, device=device), torch.ones(rows, device=device)
    return LogitsRules(
        penalties=Penalties(torch.arange(rows, device=device), seen.bool(), seen, factors, factors, factors)
    )


def dummy_inputs(batch: InputBatch, lengths: list[int], device: torch.device) -> StepInputs:
    """Prompts of these lengths whose every token goes to block 1: the result is meaningless, the memory is not."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])
    table = np.ones((len(lengths), batch.block_table.shape[1]), dtype=np.int32)
    slots = batch.block_size + positions % batch.block_size
    metadata = make_metadata(starts, np.array(lengths), table, slots, device)
    tokens, at, last = to_device([np.zeros_like(positions), positions, starts[1:] - 1], device)
    return StepInputs(tokens, at, metadata, last, [], [])
