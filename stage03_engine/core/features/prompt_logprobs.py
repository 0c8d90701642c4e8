"""Log-probabilities of the tokens of a prompt (vLLM: GPUModelRunner._get_prompt_logprobs_dict).

The hidden state of position i predicts token i + 1. Sampling needs the last position only; here every position of the prompt
that a step computes goes through the output matrix too, a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stage03_engine.core.input_batch import InputBatch
from stage03_engine.messages import TokenLogprobs
from stage04_kernels.sampler import gather_logprobs

MAX_ROWS = 256  # of logits at a time: 50 MB for GPT-2's vocabulary


def prompt_logprobs(
    batch: InputBatch, scheduled: dict[str, int], hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
) -> dict[str, tuple[int, list[TokenLogprobs]]]:
    """For each request that asks: how many prompt tokens come before this step's, and one entry per token that it predicts.

    hidden: [num_tokens, hidden_size], in the order of `scheduled`; `batch.num_computed` counts this step already.
    """
    found = {}
    start = 0  # of the request's tokens in `hidden`
    for request_id, count in scheduled.items():
        row = batch.row_of[request_id]
        request = batch.rows[row]
        first = int(batch.num_computed[row]) - count
        last = min(first + count, request.num_prompt_tokens - 1)  # the prompt's last token predicts output
        if request.num_prompt_logprobs is not None and first < last:
            targets = torch.from_numpy(batch.token_ids[row, first + 1 : last + 1]).to(hidden.device)
            states = hidden[start : start + last - first]
            found[request_id] = (first, _gather(states, targets, request.num_prompt_logprobs, compute_logits))
        start += count
    return found


def _gather(
    states: Tensor, targets: Tensor, num_logprobs: int, compute_logits: Callable[[Tensor], Tensor]
) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for some, tokens in zip(states.split(MAX_ROWS), targets.split(MAX_ROWS)):
        ids, logprobs, ranks = gather_logprobs(compute_logits(some), tokens, num_logprobs)
        entries += map(TokenLogprobs, ids.tolist(), logprobs.tolist(), ranks.tolist())
    return entries
