"""What the scheduler sends to the worker, and what the worker returns: only what changed since the last step.

Source: vllm/v1/core/sched/output.py (SchedulerOutput), vllm/v1/outputs.py (ModelRunnerOutput).
"""

from __future__ import annotations

from typing import Any

import msgspec

from stage03_engine.messages import TokenLogprobs
from stage03_engine.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request that the worker does not know: new, or resumed after preemption (then with its output so far)."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    task: Any = None  # of the request


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's decision. Only hooks fill the fields with a default.

    `new_block_ids` holds, for requests that the worker knows, the blocks to append to their tables."""

    step: int
    scheduled_new_reqs: list[NewRequestData]
    new_block_ids: dict[str, list[int]]
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: list[str]
    preempted_req_ids: list[str]
    blocks_to_swap_out: list[tuple[int, int]] = []  # (block of the KV cache, CPU block), copied before the model runs
    blocks_to_swap_in: list[tuple[int, int]] = []  # (CPU block, block of the KV cache), copied after those
    grammar_bitmask: dict[str, bytes] | None = None  # of requests with a grammar that are sampled: the tokens it allows
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}  # drafts to verify; num_scheduled_tokens counts them
    new_token_ids: dict[str, list[int]] = {}  # sampled since the last decision, for pipeline stages that do not sample

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens in this step."""
        return sum(self.num_scheduled_tokens.values())


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Sampled token ids (and logprobs if requested) of the requests that have caught up with all of their tokens."""

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = {}  # and how many prompt tokens come before them
    draft_token_ids: dict[str, list[int]] = {}  # proposed for the next step
    pooled: dict[str, list[bytes]] = {}  # of pooling requests that have caught up: their vectors of float32
