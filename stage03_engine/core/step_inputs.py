"""The tensors of one step, gathered from the persistent batch (vLLM: GPUModelRunner._prepare_inputs)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.sched_output import SchedulerOutput
from stage04_kernels.attention import AttentionMetadata


@dataclass
class StepInputs:
    """The tensors of one step. `sampled` and `ahead` have one entry per row of logits: the row of the persistent batch that it
    belongs to, and how many tokens further on than the next one it looks (0, but for drafts)."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata
    logits_indices: (
        Tensor  # [num_logits] int64: whose hidden states become logits; the last token of each sampled request
    )
    sampled: list[int]
    ahead: list[int]


def prepare_inputs(batch: InputBatch, scheduler_output: SchedulerOutput, device: torch.device) -> StepInputs:
    """Gather the scheduled tokens of all requests into one flat row, and count them as computed.

    Invariant: token i of the row belongs to batch row `owner[i]`, has position `positions[i]` in its request, and its
    key and value go to slot block_table[owner, position // block_size] * block_size + position % block_size.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    rows = np.array([batch.row_of[request_id] for request_id in scheduled])
    counts = np.array(list(scheduled.values()))
    starts = np.concatenate(([0], np.cumsum(counts)))  # [num_reqs + 1]
    owner = np.repeat(rows, counts)  # [num_tokens]
    first = batch.num_computed[rows]
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, counts)  # [num_tokens]
    blocks = batch.block_table[owner, positions // batch.block_size].astype(np.int64)
    slots = blocks * batch.block_size + positions % batch.block_size
    seq_lens = first + counts
    batch.num_computed[rows] = seq_lens
    caught_up = np.flatnonzero(seq_lens >= batch.num_tokens[rows])  # greater with drafts behind
    return StepInputs(
        to_device(batch.token_ids[owner, positions], device),
        to_device(positions, device),
        _metadata(starts, seq_lens, batch.block_table[rows], slots, device),
        to_device(starts[1:][caught_up] - 1, device),
        rows[caught_up].tolist(),
        [0] * len(caught_up),
    )


def dummy_inputs(batch: InputBatch, lengths: list[int], device: torch.device) -> StepInputs:
    """Prompts of these lengths whose every token goes to block 1: the result is meaningless, the memory is not."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(length) for length in lengths])
    table = np.ones((len(lengths), batch.block_table.shape[1]), dtype=np.int32)
    slots = batch.block_size + positions % batch.block_size
    metadata = _metadata(starts, np.array(lengths), table, slots, device)
    tokens, last = to_device(np.zeros_like(positions), device), to_device(starts[1:] - 1, device)
    return StepInputs(tokens, to_device(positions, device), metadata, last, [], [])


def _metadata(
    starts: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray, slots: np.ndarray, device: torch.device
) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=to_device(starts.astype(np.int32), device),
        seq_lens=to_device(seq_lens.astype(np.int32), device),
        block_table=to_device(block_table, device),
        slot_mapping=to_device(slots, device),
        query_start_loc_cpu=starts.tolist(),
        seq_lens_cpu=seq_lens.tolist(),
        max_query_len=int(np.diff(starts).max()),
        max_seq_len=int(seq_lens.max()),
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there; the copy to a GPU may still be under way."""
    return torch.from_numpy(array).to(device, non_blocking=True)
