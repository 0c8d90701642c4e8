"""The scheduler: which request gets how many tokens in this step (vllm/v1/core/sched/scheduler.py).

A pure function of its state and its inputs (arrivals, aborts, sampled tokens): no clock, no randomness, no I/O, no tensors.
So every decision can be replayed, and tested in milliseconds.
"""

from __future__ import annotations

from collections import deque
from copy import copy

from stage03_engine.config import SchedulerConfig
from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.request import Request, RequestStatus, append_tokens
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage03_engine.core.spec_decode.draft_scheduler import DraftScheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason, SchedulerStats
from stagetrace import trace


class Scheduler:
    """Continuous batching under one token budget.

    `schedule()` gives tokens to the running requests first, then admits waiting ones in order of arrival. When no block is
    free for a running request, the one that came last gives its blocks back and recomputes later (preemption).

    Invariant: a request is in `waiting` or in `running`, never in both, and only running requests hold blocks.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.kv_cache_manager = KVCacheManager(num_blocks, block_size)
        self.drafts = DraftScheduler(self.kv_cache_manager, config.max_num_batched_tokens, max_model_len)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_req_ids: list[str] = []  # to be told to the worker with the next step
        self.step = 0
        self.num_preemptions = 0
        if trace.on:
            trace.emit(
                "scheduler.created",
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )

    # Arrivals and departures

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError when its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already scheduled")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if trace.on:
            trace.emit("sched.queued", req=request.request_id, waiting=len(self.waiting))

    def finish_requests(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests from outside (abort, stop string); ids that are unknown or already finished are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Free the blocks and forget. The caller has taken the request out of its queue."""
        request.status = RequestStatus.FINISHED
        freed = self.kv_cache_manager.free(request.request_id)
        del self.requests[request.request_id]
        self.finished_req_ids.append(request.request_id)
        if trace.on:
            trace.emit("sched.finished", req=request.request_id, step=self.step, reason=str(reason), freed_blocks=freed)

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there work for another step?"""
        return bool(self.requests)

    # One step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Every scheduled token has a slot in the KV cache; their sum is within the budget."""
        self.step += 1
        output = SchedulerOutput(self.step, [], {}, {}, self.finished_req_ids, [])
        self.finished_req_ids = []
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        if not output.preempted_req_ids:  # who was just sent away must not be overtaken by a newcomer
            self._schedule_waiting(output, budget)
        self.drafts.schedule(output, self.requests)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        if trace.on:
            trace.emit(
                "sched.output",
                step=self.step,
                total_tokens=output.total_num_scheduled_tokens,
                budget=self.config.max_num_batched_tokens,
                free_blocks=self.kv_cache_manager.block_pool.num_free,
            )
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Tokens for running requests, in order of admission; returns the budget that is left."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            new_blocks = self._allocate_or_preempt(request, num_tokens, output)
            if new_blocks is None:  # the request itself was the last one, and is preempted now
                break
            output.new_block_ids[request.request_id] = new_blocks
            output.num_scheduled_tokens[request.request_id] = num_tokens
            self._trace_scheduled(request, num_tokens, new_blocks)
            budget -= num_tokens
            index += 1
        return budget

    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """Blocks for the next `num_tokens` tokens of a running request, preempting from the end of the queue until there
        are enough. Returns None when `request` itself had to go."""
        while True:
            end = request.num_computed_tokens + num_tokens
            new_blocks = self.kv_cache_manager.allocate_slots(request.request_id, end)
            if new_blocks is not None:
                return new_blocks
            victim = self.running.pop()
            self._preempt(victim, output)
            if victim is request:
                return None

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take a running request's blocks; it waits at the front and recomputes all its tokens when it resumes."""
        freed = self.kv_cache_manager.free(request.request_id)
        if trace.on:
            trace.emit(
                "sched.preempt",
                req=request.request_id,
                step=self.step,
                freed_blocks=freed,
                num_computed=request.num_computed_tokens,
            )
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        output.preempted_req_ids.append(request.request_id)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order while budget, batch and blocks last. The first that does not fit stops the
        rest: whoever came first is served first."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            num_tokens = request.num_tokens
            if num_tokens > budget:
                if not self.config.enable_chunked_prefill:
                    break
                num_tokens = budget
            new_blocks = self.kv_cache_manager.allocate_slots(request.request_id, num_tokens)
            if new_blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            self._trace_admitted(request, new_blocks)
            request.status = RequestStatus.RUNNING
            output.scheduled_new_reqs.append(
                NewRequestData(
                    request.request_id,
                    request.all_token_ids,
                    request.num_prompt_tokens,
                    request.sampling_params,
                    request.seed,
                    new_blocks,
                    request.num_computed_tokens,
                )
            )
            output.num_scheduled_tokens[request.request_id] = num_tokens
            self._trace_scheduled(request, num_tokens, new_blocks)
            budget -= num_tokens

    def update_from_output(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append the sampled tokens and end the requests that are complete."""
        outputs: list[EngineCoreOutput] = []
        stopped: set[str] = set()
        for request_id, new_token_ids in runner_output.sampled_token_ids.items():
            request = self.requests[request_id]
            self.drafts.settle(output, request, len(new_token_ids))
            request.spec_token_ids = runner_output.draft_token_ids.get(request_id, [])
            new_token_ids, stop = append_tokens(request, new_token_ids, self.max_model_len)
            reason, stop_reason = stop or (None, None)
            logprobs = runner_output.logprobs.get(request_id)
            if logprobs is not None:
                logprobs = logprobs[: len(new_token_ids)]
            outputs.append(EngineCoreOutput(request_id, new_token_ids, logprobs, reason, stop_reason))
            if trace.on:
                trace.emit(
                    "sched.token",
                    req=request_id,
                    step=output.step,
                    token_ids=new_token_ids,
                    num_output_tokens=request.num_output_tokens,
                )
            if reason is not None:
                stopped.add(request_id)
                self._finish(request, reason)
        if stopped:
            self.running = [request for request in self.running if request.request_id not in stopped]
        return outputs

    # Looking in from outside

    def make_stats(self) -> SchedulerStats:
        """The state after a step, for the metrics."""
        usage = self.kv_cache_manager.block_pool.usage
        return SchedulerStats(
            len(self.running), len(self.waiting), usage, self.num_preemptions, copy(self.drafts.stats)
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        self.kv_cache_manager.check_invariants()
        running, waiting = {r.request_id for r in self.running}, {r.request_id for r in self.waiting}
        assert len(running) == len(self.running) and len(waiting) == len(self.waiting), "a request is queued twice"
        assert not running & waiting, "a request both runs and waits"
        assert running | waiting == set(self.requests), "a request is lost"
        for request in self.running:
            held = len(self.kv_cache_manager.block_table(request.request_id)) * self.kv_cache_manager.block_size
            assert request.num_computed_tokens <= held, "a token has no slot"

    def _trace_admitted(self, request: Request, new_blocks: list[int]) -> None:
        if trace.on:
            if request.status == RequestStatus.PREEMPTED:
                trace.emit(
                    "sched.resume",
                    req=request.request_id,
                    step=self.step,
                    new_blocks=new_blocks,
                    num_tokens=request.num_tokens,
                )
            else:
                trace.emit(
                    "sched.admit",
                    req=request.request_id,
                    step=self.step,
                    new_blocks=new_blocks,
                    num_prompt_tokens=request.num_prompt_tokens,
                )

    def _trace_scheduled(self, request: Request, num_tokens: int, new_blocks: list[int]) -> None:
        if trace.on:
            trace.emit(
                "sched.scheduled",
                req=request.request_id,
                step=self.step,
                num_tokens=num_tokens,
                num_computed=request.num_computed_tokens,
                new_blocks=new_blocks,
            )
