"""A scheduler that decides steps while others are in flight in the stages of a pipeline (vllm/v1/core/sched/scheduler.py). No torch.

A request whose next token is in flight is not scheduled: it has nothing to compute until that token is known. A long prompt may
have several chunks in flight, because they need no new token. (`--async-scheduling` decides steps before their tokens are known; here none is.)

Steps in flight should have the same size, or stages wait for each other. So with n stages a step takes at most one n-th of the running
requests. The others go into the next steps, and each group comes back with its tokens. vLLM takes all that are ready, and so does
`--no-pipeline-groups`: then requests that are admitted together stay together, and all stages but one are idle.

When a step's tokens arrive, those of requests that have ended or lost their blocks meanwhile are dropped. A preempted request
computes its last token again, and samples the same one. Its blocks can be reused at once: every stage runs the steps in order, so whatever a
step in flight writes to a block is written before the next owner writes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput


class NewTokens(msgspec.Struct, array_like=True):
    """The tokens of each request that were sampled since the last decision, for the stages that do not sample."""

    token_ids: dict[str, list[int]]


NEW_TOKENS = Extra("pipeline", NewTokens)


class PipelineScheduler(Scheduler):
    """`schedule` may be called again before the `update_from_output` of up to `pipeline_stages` - 1 steps before it.

    Invariant: outside of `schedule`, `num_tokens` of every request counts its known tokens.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Step -> the requests that it computes, each with the number of its preemptions at that time.
        self._in_flight: dict[int, dict[str, tuple[Request, int]]] = {}
        self._new_token_ids: dict[str, list[int]] = {}  # since the last decision

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, for the requests that are not in flight."""
        later = [(request, request.num_tokens) for request in self._later()]
        for request, _ in later:
            request.num_tokens = request.num_computed_tokens  # so there is nothing to compute for it
        output = super().schedule()
        for request, num_tokens in later:
            request.num_tokens = num_tokens
        scheduled = (self.requests[request_id] for request_id in output.num_scheduled_tokens)
        NEW_TOKENS.put(output.extras, NewTokens(self._new_token_ids))
        self._new_token_ids = {}
        self._in_flight[output.step] = {each.request_id: (each, each.num_preemptions) for each in scheduled}
        return output

    def _later(self) -> list[Request]:
        """The running requests that this step leaves to later ones, so that all steps have the same size. Prompts are never left: the token
        budget limits them."""
        if not self.config.pipeline_groups:
            return []
        ready = [r for r in self.running if r.num_computed_tokens < r.num_tokens and r.num_output_tokens > 0]
        return ready[cdiv(len(self.running), self.config.pipeline_stages) :]

    def can_schedule(self) -> bool:
        """Is there anything to schedule while steps are in flight?"""
        return any(r.num_computed_tokens < r.num_tokens for r in self.running) or (
            len(self.waiting) > 0 and len(self.running) < self.config.max_num_seqs
        )

    def update_from_output(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append the sampled tokens of the requests that still run, and drop the others."""
        for request_id, (request, num_preemptions) in self._in_flight.pop(output.step).items():
            ended = self.requests.get(request_id) is not request  # its id may have a new owner
            if ended:
                runner_output.drop(request_id)
            elif request.num_preemptions > num_preemptions:
                runner_output.sampled_token_ids.pop(request_id, None)
                runner_output.logprobs.pop(request_id, None)
        self._new_token_ids |= runner_output.sampled_token_ids
        newest, self.step = self.step, output.step  # events name the step whose token ended a request
        outputs = super().update_from_output(output, runner_output)
        self.step = newest
        return outputs
