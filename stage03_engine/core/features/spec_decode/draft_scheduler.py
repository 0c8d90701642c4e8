"""Drafts in the scheduler: they get what nobody else needs, and leave no trace when they are rejected.

Source: vllm/v1/core/sched/scheduler.py (scheduled_spec_decode_tokens in schedule and update_from_output). Plain Python, no
tensors.
"""

from __future__ import annotations

from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.messages import SpecDecodingStats
from stagetrace import trace


class DraftScheduler:
    """Adds draft tokens to a decision that is complete without them, and settles them afterwards.

    Drafts come last: after every running and every admitted request has its tokens, they share what is left of the
    budget and of the free blocks. So they take nothing from anybody, and never cause a preemption: what a rejected
    draft had is free again before the next step.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, max_num_batched_tokens: int, max_model_len: int) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.stats = SpecDecodingStats()

    def schedule(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Extend `output` by the drafts of the requests that catch up in this step."""
        budget = self.max_num_batched_tokens - output.total_num_scheduled_tokens
        for request_id, new_blocks in output.new_block_ids.items():
            request = requests[request_id]
            end = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            count = min(len(request.spec_token_ids), budget, self._useful(request))
            if count <= 0 or end < request.num_tokens:
                continue
            more_blocks = self.kv_cache_manager.allocate_slots(request, end + count)
            if more_blocks is None:  # no block is free: only what the last one has room for
                more_blocks = []
                held = len(self.kv_cache_manager.block_table(request_id))
                count = held * self.kv_cache_manager.block_size - end
                if count == 0:
                    continue
            new_blocks += more_blocks
            output.num_scheduled_tokens[request_id] += count
            output.scheduled_spec_decode_tokens[request_id] = request.spec_token_ids[:count]
            budget -= count
            if trace.on:
                trace.emit("spec.scheduled", req=request_id, step=output.step, num_tokens=count, new_blocks=more_blocks)

    def _useful(self, request: Request) -> int:
        """Drafts that could still be needed: k of them give up to k + 1 tokens."""
        params = request.sampling_params
        left = (params.max_tokens or self.max_model_len) - request.num_output_tokens
        return min(left, self.max_model_len - request.num_tokens) - 1

    def settle(self, output: SchedulerOutput, request: Request, num_sampled: int) -> None:
        """The worker sampled `num_sampled` tokens, one more than it accepted drafts: take back what was rejected."""
        drafts = output.scheduled_spec_decode_tokens.get(request.request_id)
        if drafts is None:
            return
        accepted = num_sampled - 1
        request.num_computed_tokens -= len(drafts) - accepted
        self.kv_cache_manager.trim(request.request_id, request.num_computed_tokens)
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(drafts)
        self.stats.num_accepted_tokens += accepted
        if trace.on:
            trace.emit(
                "spec.verified", req=request.request_id, step=output.step, accepted=accepted, drafted=len(drafts)
            )
