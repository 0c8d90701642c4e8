"""The persistent batch: what the model runner keeps of each request between steps (vllm/v1/worker/gpu_input_batch.py), and
the tensors of one step, gathered from it (GPUModelRunner._prepare_inputs).

A step changes little: a token per request, now and then a block. So the runner keeps one row per request in arrays that
are allocated once, applies the scheduler's deltas, and never rebuilds the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.sched_output import NewRequestData, SchedulerOutput
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.sampler import to_device

SETTINGS = {
    "temperature": np.float32,  # 0 if it is low enough to count as greedy
    "top_k": np.int64, "top_p": np.float32, "min_p": np.float32, "seed": np.int64, "num_prompt_tokens": np.int64,
    "num_likely_tokens": np.int64,  # how many of the likeliest tokens each step reports; -1: no logprobs at all
}  # fmt: skip


@dataclass
class InputBatch:
    """Rows 0 .. num_reqs-1 are in use, without holes.

    token_ids    [max_num_seqs, max_model_len]    prompt and output
    num_tokens   [max_num_seqs]                   how many of them are known
    num_computed [max_num_seqs]                   how many have keys and values in the cache
    block_table  [max_num_seqs, blocks per request]
    settings     [max_num_seqs] each              what the sampler reads
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    row_of: dict[str, int] = field(default_factory=dict)
    requests: list[NewRequestData] = field(default_factory=list)  # as they came
    request_ids: list[str] = field(default_factory=list)
    with_settings: set[str] = field(default_factory=set)  # who draws, or reports logprobs; the others take the argmax

    def __post_init__(self) -> None:
        self.token_ids = np.zeros((self.max_num_seqs, self.max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(self.max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(self.max_num_seqs, dtype=np.int64)
        max_blocks = cdiv(self.max_model_len, self.block_size)
        self.block_table = np.zeros((self.max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(self.max_num_seqs, dtype=np.int64)
        self.settings = {name: np.zeros(self.max_num_seqs, dtype=dtype) for name, dtype in SETTINGS.items()}

    def add(self, new: NewRequestData) -> None:
        """Put a request into the next row."""
        row = len(self.requests)
        self.row_of[new.request_id] = row
        self.request_ids.append(new.request_id)
        self.requests.append(new)
        params = new.sampling_params
        if not params.greedy or params.num_likely_tokens is not None:
            self.with_settings.add(new.request_id)
        temperature = 0.0 if params.greedy else params.temperature
        likely = -1 if params.num_likely_tokens is None else params.num_likely_tokens
        values = (temperature, params.top_k, params.top_p, params.min_p, new.seed, new.num_prompt_tokens, likely)
        for column, value in zip(self.settings.values(), values, strict=True):
            column[row] = value
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.num_blocks[row] = 0
        self.append_blocks(new.request_id, new.block_ids)

    def append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        """Block tables only grow at their end."""
        row = self.row_of[request_id]
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def append_tokens(self, row: int, token_ids: list[int]) -> None:
        """Append sampled tokens, as far as they fit into the context; the last is the input of the next step."""
        start = int(self.num_tokens[row])
        end = min(start + len(token_ids), self.max_model_len)
        self.token_ids[row, start:end] = token_ids[: end - start]
        self.num_tokens[row] = end

    def append_token_each(self, rows: list[int], token_ids: np.ndarray) -> None:
        """The same for one token of each row: a request that is sampled has room for it."""
        at = np.array(rows)
        places = self.num_tokens[at]
        self.token_ids[at, places] = token_ids
        self.num_tokens[at] = places + 1

    def tokens_of(self, row: int, ahead: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a row, with the first `ahead` of its drafts: views of its token ids."""
        end, split = self.num_tokens[row] + ahead, self.requests[row].num_prompt_tokens
        return self.token_ids[row, :split], self.token_ids[row, split:end]

    def remove(self, request_id: str) -> None:
        """Forget a request; the last row moves into the hole. An unknown id (it never got a step) is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.requests) - 1
        if row != last:
            moved = self.request_ids[last]
            arrays: list[np.ndarray] = [*self.settings.values(), self.token_ids, self.block_table, self.num_blocks]
            for array in (*arrays, self.num_tokens, self.num_computed):
                array[row] = array[last]
            self.requests[row], self.request_ids[row], self.row_of[moved] = self.requests[last], moved, row
        self.requests.pop()
        self.request_ids.pop()
        self.with_settings.discard(request_id)


@dataclass
class StepInputs:
    """The tensors of one step. `sampled` and `ahead` have one entry per row of logits: its row in the persistent batch, and
    how many tokens beyond the next one it predicts (0, except for drafts)."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64; a hook may give them components, [num_tokens, 3]
    metadata: AttentionMetadata
    logits_indices: (
        Tensor  # [num_logits] int64: whose hidden states become logits; the last token of each sampled request
    )
    sampled: list[int]
    ahead: list[int]
    replayable: bool = True  # False: no recording of the model computes this step


def prepare_inputs(batch: InputBatch, scheduler_output: SchedulerOutput, device: torch.device) -> StepInputs:
    """Gather the scheduled tokens of all requests into one flat row, and count them as computed."""
    scheduled = scheduler_output.num_scheduled_tokens
    rows = np.array([batch.row_of[request_id] for request_id in scheduled])
    first = batch.num_computed[rows]
    batch.num_computed[rows] = seq_lens = first + np.array(list(scheduled.values()))
    caught_up = (seq_lens >= batch.num_tokens[rows]).nonzero()[0]  # greater if drafts follow
    return gather_inputs(batch, rows, first, seq_lens, caught_up, device)


def gather_inputs(
    batch: InputBatch, rows: np.ndarray, first: np.ndarray, seq_lens: np.ndarray, chosen: np.ndarray, device: torch.device
) -> StepInputs:  # fmt: skip
    """The tokens from `first` up to `seq_lens` of each of these rows of the batch. The last one becomes logits where `chosen`, indices into
    `rows`, says so.

    Invariant: token i of the row belongs to batch row `owner[i]`, has position `positions[i]` in its request, and its
    key and value go to slot block_table[owner, position // block_size] * block_size + position % block_size.
    """
    counts = seq_lens - first
    if counts.sum() == len(rows):  # one token each, as in most steps
        starts, owner, positions = np.arange(len(rows) + 1), rows, first
    else:
        starts = np.concatenate(([0], np.cumsum(counts)))  # [num_reqs + 1]
        owner = np.repeat(rows, counts)  # [num_tokens]
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - first, counts)  # [num_tokens]
    blocks = batch.block_table[owner, positions // batch.block_size].astype(np.int64)
    slots = blocks * batch.block_size + positions % batch.block_size
    ids, at, last = to_device([batch.token_ids[owner, positions], positions, starts[1:][chosen] - 1], device)
    metadata = make_metadata(starts, seq_lens, batch.block_table[rows], slots, device)
    return StepInputs(ids, at, metadata, last, rows[chosen].tolist(), [0] * len(chosen))


def make_metadata(
    starts: np.ndarray, seq_lens: np.ndarray, block_table: np.ndarray, slots: np.ndarray, device: torch.device
) -> AttentionMetadata:
    """What attention needs to know: where each request's tokens begin, its length, its blocks, the slots to write."""
    arrays = [starts.astype(np.int32), seq_lens.astype(np.int32), block_table, slots]
    first, lengths, table, slot_mapping = to_device(arrays, device)
    longest = 1 if len(slots) == len(seq_lens) else int(np.diff(starts).max())
    contexts = seq_lens.tolist()
    return AttentionMetadata(first, lengths, table, slot_mapping, starts.tolist(), contexts, longest, max(contexts))
