"""From hidden states to vectors (vllm/model_executor/layers/pooler, v1/pool/metadata.py).

A prompt may take several steps, and a preempted request computes some of its tokens twice. So the pooler keeps, for each
request until it ends, what its tokens amount to so far, and how many tokens that are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from stage03_engine.config import VllmConfig
from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.pooling_params import PoolingParams, PoolingRule


def make_rule(params: PoolingParams, config: VllmConfig) -> PoolingRule:
    """The request's settings, and the server's where it has none."""
    default = config.pooling_config
    size = params.dimensions or default.dimensions or config.shape.hidden_size
    kind = params.pooling_type or default.pooling_type
    normalize = default.use_activation if params.normalize is None else params.normalize
    return PoolingRule("ALL" if params.task == "token_embed" else kind, normalize, size)


@dataclass
class PoolingState:
    """What the first `num_seen` tokens of a request amount to: `kept` holds one row (the first or the last hidden state, or
    the sum) or, with ALL, one row per token, in several pieces."""

    rule: PoolingRule
    num_tokens: int
    num_seen: int = 0
    kept: list[Tensor] = field(default_factory=list)  # float32 [rows, hidden_size]

    def take_in(self, states: Tensor, first: int) -> None:
        """`states`, [count, hidden_size], are those of the tokens from `first` on. What was seen before counts once."""
        new = states[max(0, self.num_seen - first) :].float()
        if not len(new):
            return
        self.num_seen = first + len(states)
        if self.rule.pooling_type == "ALL":
            self.kept.append(new)
        elif self.rule.pooling_type == "MEAN":
            total = new.sum(0, keepdim=True)
            self.kept = [self.kept[0] + total if self.kept else total]
        elif self.rule.pooling_type == "LAST":
            self.kept = [new[-1:]]
        elif not self.kept:  # CLS
            self.kept = [new[:1]]

    def vectors(self) -> list[bytes]:
        """When all tokens were seen: one vector, or with ALL one per token."""
        rows = torch.cat(self.kept)
        if self.rule.pooling_type == "MEAN":
            rows = rows / self.num_tokens
        rows = rows[:, : self.rule.dimensions]
        if self.rule.normalize:
            rows = F.normalize(rows, dim=-1)
        return [row.numpy().tobytes() for row in rows.cpu()]


class Pooler:
    """The states of all pooling requests that run, or wait for another turn after a preemption."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._states: dict[str, PoolingState] = {}

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests that ended, expect new ones; those that resume are known."""
        for request_id in scheduler_output.finished_req_ids:
            self._states.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.request_id not in self._states:
                rule = make_rule(new.pooling_params or PoolingParams(), self._config)
                self._states[new.request_id] = PoolingState(rule, new.num_prompt_tokens)

    def pool(self, batch: InputBatch, scheduler_output: SchedulerOutput, hidden: Tensor) -> dict[str, list[bytes]]:
        """The vectors of the requests whose prompts this step completes.

        hidden: [num_tokens, hidden_size], in the order of `num_scheduled_tokens`; `batch.num_computed` counts this step.
        """
        done = {}
        start = 0  # of the request's tokens in `hidden`
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            state, end = self._states[request_id], int(batch.num_computed[batch.row_of[request_id]])
            state.take_in(hidden[start : start + count], end - count)
            if end == state.num_tokens:
                done[request_id] = state.vectors()
            start += count
        return done
