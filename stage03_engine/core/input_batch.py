"""The persistent batch: what the model runner remembers of each request between steps (vllm/v1/worker/gpu_input_batch.py).

A step changes little: a token per request, now and then a block. So the runner keeps one row per request in arrays that
are allocated once, applies the scheduler's deltas, and never rebuilds the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.logits_rules import RequestRules
from stage03_engine.core.sched_output import NewRequestData
from stage03_engine.sampling_params import SamplingParams


@dataclass
class CachedRequestState:
    """The parts of a request that are not arrays."""

    sampling_params: SamplingParams
    seed: int
    num_prompt_tokens: int
    rules: RequestRules | None = None  # None: its sampling parameters change no logits
    temperature: float = 0.0  # 0 if it is low enough to count as greedy
    num_likely_tokens: int | None = None  # how many of the likeliest tokens each step reports; None: no logprobs at all


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
    requests: list[CachedRequestState] = field(default_factory=list)
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
        row = len(self.requests)
        self.row_of[new.request_id] = row
        self.request_ids.append(new.request_id)
        params, rules = new.sampling_params, RequestRules.of(new.sampling_params, self.vocab_size)
        temperature = 0.0 if params.greedy else params.temperature
        self.requests.append(
            CachedRequestState(params, new.seed, new.num_prompt_tokens, rules, temperature, params.num_likely_tokens)
        )
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
        """Sampled tokens, as far as the context has room for them; the last is the input of the next step."""
        start = int(self.num_tokens[row])
        end = min(start + len(token_ids), self.max_model_len)
        self.token_ids[row, start:end] = token_ids[: end - start]
        self.num_tokens[row] = end

    def tokens_of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a row: views of its token ids."""
        end, split = self.num_tokens[row], self.requests[row].num_prompt_tokens
        return self.token_ids[row, :split], self.token_ids[row, split:end]

    def remove(self, request_id: str) -> None:
        """Forget a request; the last row moves into the hole. An unknown id (it never got a step) is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.requests) - 1
        if row != last:
            moved = self.request_ids[last]
            for array in (self.token_ids, self.num_tokens, self.num_computed, self.block_table, self.num_blocks):
                array[row] = array[last]
            self.requests[row], self.request_ids[row], self.row_of[moved] = self.requests[last], moved, row
        self.requests.pop()
        self.request_ids.pop()
