"""Drafts in the scheduler: they get what no request needs, and give everything back when rejected.

Source: vllm/v1/core/sched/scheduler.py (scheduled_spec_decode_tokens in schedule and update_from_output). Plain Python, no
tensors.
"""

from __future__ import annotations

import msgspec

from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput
from stagetrace import trace


class ScheduledDrafts(msgspec.Struct, array_like=True):
    """Drafts to verify in a step, by request; `num_scheduled_tokens` counts them."""

    token_ids: dict[str, list[int]]


class NextDrafts(msgspec.Struct, array_like=True):
    """A request's drafts for the next step."""

    token_ids: list[int]


SCHEDULED_DRAFTS, NEXT_DRAFTS = Extra("spec_decode", ScheduledDrafts), Extra("spec_decode", NextDrafts)


class DraftHook(SchedulerHook):
    """Adds draft tokens to a decision that is complete without them, and takes back those that were rejected.

    Drafts come last: after every running and every admitted request has its tokens, they share what is left of the
    budget and of the free blocks. So they take nothing from other requests, and never cause a preemption: what a rejected
    draft had is free again before the next step.
    """

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """Its drafts were to follow what it loses; it asks again once it has caught up."""
        request.spec_token_ids = []
        return False

    def scheduled(self, output: SchedulerOutput) -> None:
        """Extend `output` by the drafts of the requests that catch up in this step."""
        manager, requests = self.scheduler.kv_cache_manager, self.scheduler.requests
        budget = self.scheduler.config.max_num_batched_tokens - output.total_num_scheduled_tokens
        drafts: dict[str, list[int]] = {}
        for request_id, new_blocks in output.new_block_ids.items():
            request = requests[request_id]
            end = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            count = min(len(request.spec_token_ids), budget, self._useful(request))
            if count <= 0 or end < request.num_tokens:
                continue
            more_blocks = manager.allocate_slots(request, end + count)
            if more_blocks is None:  # no block is free: only what the last one has room for
                more_blocks = []
                held = len(manager.block_table(request_id))
                count = held * manager.block_size - end
                if count == 0:
                    continue
            new_blocks += more_blocks
            output.num_scheduled_tokens[request_id] += count
            drafts[request_id] = request.spec_token_ids[:count]
            budget -= count
            if trace.on:
                trace.emit("spec.scheduled", req=request_id, step=output.step, num_tokens=count, new_blocks=more_blocks)
        if drafts:
            SCHEDULED_DRAFTS.put(output.extras, ScheduledDrafts(drafts))

    def _useful(self, request: Request) -> int:
        """Drafts that could still be needed: k of them give up to k + 1 tokens."""
        params, max_model_len = request.sampling_params, self.scheduler.max_model_len
        left = (params.max_tokens or max_model_len) - request.num_output_tokens
        return min(left, max_model_len - request.num_tokens) - 1

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """The worker sampled one token more than it accepted drafts: take back what was rejected, keep the new drafts."""
        request_id = request.request_id
        proposed = NEXT_DRAFTS.of(runner_output.results.get(request_id, {}))
        request.spec_token_ids = proposed.token_ids if proposed else []
        scheduled = SCHEDULED_DRAFTS.of(output.extras)
        if scheduled is None or (drafts := scheduled.token_ids.get(request_id)) is None:
            return None
        accepted = len(runner_output.sampled_token_ids[request_id]) - 1
        request.num_computed_tokens -= len(drafts) - accepted
        self.scheduler.kv_cache_manager.trim(request_id, request.num_computed_tokens)
        self.scheduler.stats.count(
            spec_decode_num_drafts=1,
            spec_decode_num_draft_tokens=len(drafts),
            spec_decode_num_accepted_tokens=accepted,
            **{f"spec_decode_num_accepted_tokens_per_pos{{{position}}}": 1 for position in range(accepted)},
        )
        if trace.on:
            trace.emit("spec.verified", req=request_id, step=output.step, accepted=accepted, drafted=len(drafts))
        return None
