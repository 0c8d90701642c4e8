"""From hidden states to vectors (vllm/model_executor/layers/pooler, v1/pool/metadata.py).

A prompt may take several steps, and a preempted request computes some of its tokens twice. So the pooler keeps, for each
request until it ends, the partial result over its tokens so far, and how many tokens that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from stage03_engine.config import VllmConfig
from stage03_engine.core.input_batch import InputBatch
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.messages import payload
from stage03_engine.params.pooling_params import TOKEN_TASKS, PoolingParams, PoolingRule
from stagetrace import trace


def make_rule(params: PoolingParams, config: VllmConfig) -> PoolingRule:
    """The request's settings, and the server's where it has none."""
    default = config.pooling_config
    size = params.dimensions or default.dimensions or config.shape.hidden_size
    kind = params.pooling_type or default.pooling_type
    normalize = default.use_activation if params.normalize is None else params.normalize
    activation = config.shape.label_activation if config.is_classifier else None
    return PoolingRule("ALL" if params.task in TOKEN_TASKS else kind, normalize, size, activation)


@dataclass
class PoolingState:
    """The partial result over a request's first `num_seen` tokens: `kept` holds one row (the first or the last hidden state, or
    the sum) or, with ALL, one row per token, in several pieces."""

    rule: PoolingRule
    num_tokens: int
    num_seen: int = 0
    kept: list[Tensor] = field(default_factory=list)  # float32 [rows, hidden_size]

    def add(self, states: Tensor, first: int) -> None:
        """`states`, [count, hidden_size], are those of the tokens from `first` on. What was added before counts once.

        What is kept is a copy: the next step may write over `states` (CUDA graphs do).
        """
        new = states[max(0, self.num_seen - first) :]
        if not len(new):
            return
        self.num_seen = first + len(states)
        if self.rule.pooling_type == "ALL":
            self.kept.append(new.to(torch.float32, copy=True))
        elif self.rule.pooling_type == "MEAN":
            total = new.float().sum(0, keepdim=True)
            self.kept = [self.kept[0] + total if self.kept else total]
        elif self.rule.pooling_type == "LAST":
            self.kept = [new[-1:].to(torch.float32, copy=True)]
        elif not self.kept:  # CLS
            self.kept = [new[:1].to(torch.float32, copy=True)]

    def pooled(self) -> Tensor:
        """When all tokens were seen, [rows, hidden_size]: one row, or with ALL one per token."""
        rows = torch.cat(self.kept)
        return rows / self.num_tokens if self.rule.pooling_type == "MEAN" else rows


def embeddings(pooled: Tensor, rule: PoolingRule) -> Tensor:
    """[rows, hidden_size] -> [rows, dimensions], of length 1 if the rule says so."""
    cut = pooled[:, : rule.dimensions]
    return F.normalize(cut, dim=-1) if rule.normalize else cut


def probabilities(logits: Tensor, rule: PoolingRule) -> Tensor:
    """[rows, num_labels] -> the same, as probabilities if the rule says so: of one class out of all, or of each by itself."""
    if not rule.normalize or rule.activation == "identity":
        return logits
    return logits.softmax(dim=-1) if rule.activation == "softmax" else logits.sigmoid()


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
                rule = make_rule(payload(new.task or PoolingParams(), PoolingParams), self._config)
                self._states[new.request_id] = PoolingState(rule, new.num_prompt_tokens)

    def pool(
        self, batch: InputBatch, scheduler_output: SchedulerOutput, hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> dict[str, list[bytes]]:
        """The vectors of the requests whose prompts this step completes.

        hidden: [num_tokens, hidden_size], in the order of `num_scheduled_tokens`; `batch.num_computed` counts this step.
        head: the model's `compute_logits`, which classifies where the model is a classifier, and is not called elsewhere.
        """
        done = {}
        start = 0  # of the request's tokens in `hidden`
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            state, end = self._states[request_id], int(batch.num_computed[batch.row_of[request_id]])
            state.add(hidden[start : start + count], end - count)
            if end == state.num_tokens:
                rows = self._vectors(request_id, state, head).cpu()
                done[request_id] = [row.numpy().tobytes() for row in rows]
            start += count
        return done

    def _vectors(self, request_id: str, state: PoolingState, head: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 [rows, dimensions or num_labels]"""
        rule, pooled = state.rule, state.pooled()
        if rule.activation is None:
            return embeddings(pooled, rule)
        logits = head(pooled)
        if trace.on:
            shown = rule.activation if rule.normalize else "identity"
            trace.emit(
                "pooler.classified", req=request_id, rows=len(logits), num_labels=logits.shape[1], activation=shown
            )
        return probabilities(logits, rule)
