"""The persistent batch: what the model runner remembers of each request between steps (vllm/v1/worker/gpu_input_batch.py).

A step changes little: a token per request, now and then a block. So the runner keeps one row per request in arrays that
are allocated once, applies the scheduler's deltas, and never rebuilds the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.logits_rules import RowRules
from stage03_engine.core.sched_output import NewRequestData
from stage03_engine.sampling_params import SamplingParams


@dataclass
class Row:
    """The parts of a request that are not arrays."""

    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    rules: RowRules | None = None
    num_prompt_logprobs: int | None = None  # None: not asked for, or given before (the request resumes with output)


@dataclass
class InputBatch:
    """Rows 0 .. num_reqs-1 are in use, without holes.

    token_ids    [max_num_seqs, max_model_len]    prompt and output
    num_tokens   [max_num_seqs]                   how many of them are known
    num_computed [max_num_seqs]                   how many have keys and values in the cache
    block_table  [max_num_seqs, blocks per request]
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocab_size: int
    row_of: dict[str, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = np.zeros((self.max_num_seqs, self.max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(self.max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(self.max_num_seqs, dtype=np.int64)
        max_blocks = cdiv(self.max_model_len, self.block_size)
        self.block_table = np.zeros((self.max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(self.max_num_seqs, dtype=np.int64)

    def add(self, new: NewRequestData) -> None:
        """Put a request into the next row."""
        row = len(self.rows)
        self.row_of[new.request_id] = row
        self.request_ids.append(new.request_id)
        params, resumes = new.sampling_params, len(new.token_ids) > new.num_prompt_tokens
        num_prompt_logprobs = None if resumes else params.prompt_logprobs
        rules = RowRules.of(params, self.vocab_size)
        self.rows.append(Row(params, new.seed, new.num_prompt_tokens, rules, num_prompt_logprobs))
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

    def append_token(self, row: int, token_id: int) -> None:
        """A sampled token; it is the input of the next step."""
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1

    def tokens_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a row: views of its token ids."""
        end, split = self.num_tokens[row], self.rows[row].num_prompt_tokens
        return self.token_ids[row, :split], self.token_ids[row, split:end]

    def put_drafts(self, row: int, draft_token_ids: list[int]) -> None:
        """Inputs of this step behind the known tokens; they are not known tokens yet."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(draft_token_ids)] = draft_token_ids

    def rewind(self, row: int, num_rejected: int) -> None:
        """Drafts were rejected: their keys and values count as not computed, and blocks that held nothing else are gone
        (the scheduler has taken them back by the same rule)."""
        self.num_computed[row] -= num_rejected
        self.num_blocks[row] = min(self.num_blocks[row], cdiv(int(self.num_computed[row]), self.block_size))

    def remove(self, request_id: str) -> None:
        """Forget a request; the last row moves into the hole. An unknown id (it never got a step) is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.rows) - 1
        if row != last:
            moved = self.request_ids[last]
            for array in (self.token_ids, self.num_tokens, self.num_computed, self.block_table, self.num_blocks):
                array[row] = array[last]
            self.rows[row], self.request_ids[row], self.row_of[moved] = self.rows[last], moved, row
        self.rows.pop()
        self.request_ids.pop()
