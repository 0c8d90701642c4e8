"""The scheduler: which request gets how many tokens in this step (vllm/v1/core/sched/scheduler.py).

A pure function of its state and its inputs (arrivals, aborts, sampled tokens): no clock, no randomness, no I/O, no tensors.
So every decision can be replayed, and tested in milliseconds.
"""

from __future__ import annotations

import itertools

import msgspec

from stage03_engine.config import CacheConfig, SchedulerConfig
from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.request import POLICIES, Request, RequestQueue, RequestStatus
from stage03_engine.core.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from stage03_engine.messages import EngineCoreOutput, FinishReason, SchedulerStats
from stage03_engine.plugins import wanted
from stagetrace import trace


class Scheduler:
    """Continuous batching under one token budget.

    `schedule()` gives tokens to the running requests first, then admits waiting ones, both in the order of the policy.
    When no block is free for a running request, the last one in that order gives its blocks back (preemption); when it
    resumes, it recomputes the tokens that the prefix cache does not have.

    `hooks` is empty until a setting or a request needs a feature that takes part in scheduling (hooks.py). A class for
    `--scheduler-cls` takes the same arguments; it must call the hooks only for the features that it is used with.

    Invariant: a request is in `waiting`, in `held` or in `running`, never in two of them, and only running requests hold blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        block_pool: BlockPool,
        max_model_len: int,
        hash_seed: bytes = b"",
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        caching, lookahead = cache_config.enable_prefix_caching, cache_config.block_hash_lookahead
        self.kv_cache_manager = KVCacheManager(block_pool, cache_config.block_size, caching, hash_seed, lookahead)
        self.hooks: list[SchedulerHook] = []
        self.requests: dict[str, Request] = {}
        policy = config.scheduling_policy
        own = policy in POLICIES
        make_queue = RequestQueue if own else wanted("policy", policy, f"scheduling policy {policy}")
        self.waiting: RequestQueue = make_queue(policy)
        self.running: RequestQueue = make_queue(policy)
        self.held: dict[str, Request] = {}  # they wait, and hooks hold them back: a step does not look at them
        self.finished_req_ids: list[str] = []  # sent to the worker with the next step
        self.step = 0
        self.stats = SchedulerStats()
        self._arrivals = itertools.count()

    # Arrivals and departures

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its id is in use, InvalidRequestError if a hook refuses it."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is already scheduled")
        for hook in self.hooks:
            hook.added(request)
        request.arrival = next(self._arrivals)
        self.requests[request.request_id] = request
        self._wait(request)
        if trace.on:
            params = request.traced_params
            for hook in self.hooks:
                params |= hook.traced_params(request)
            trace.emit(
                "sched.queued", req=request.request_id, waiting=self.num_waiting,
                num_prompt_tokens=request.num_prompt_tokens, params=params,
                block_hashes=self.kv_cache_manager.new_block_hashes(request),
            )  # fmt: skip

    def _wait(self, request: Request) -> None:
        """Queue a request, unless a hook holds it back."""
        if self.hooks and any(hook.holds(request) for hook in self.hooks):
            self.held[request.request_id] = request
        else:
            self.waiting.add(request)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run."""
        return len(self.waiting) + len(self.held)

    def finish_requests(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests from outside (abort, stop string); unknown and finished ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, reason, by="outside")

    def _finish(self, request: Request, reason: FinishReason, by: str) -> None:
        """Remove a request from its queue, free its blocks, forget it."""
        if self.held.pop(request.request_id, None) is None:
            queue = self.running if request.status == RequestStatus.RUNNING else self.waiting
            queue.remove(request)
        request.status = RequestStatus.FINISHED
        freed = self.kv_cache_manager.free(request.request_id)
        for hook in self.hooks:
            hook.finished(request)
        del self.requests[request.request_id]
        self.finished_req_ids.append(request.request_id)
        if trace.on:
            trace.emit(
                "sched.finished", req=request.request_id, step=self.step, reason=str(reason), freed_blocks=freed, by=by
            )

    @property
    def has_unfinished_requests(self) -> bool:
        """Is there work for a step?"""
        return bool(self.requests) or any(hook.held_blocks for hook in self.hooks)

    # One step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Every scheduled token has a slot in the KV cache; their sum is within the budget."""
        self.step += 1
        output = SchedulerOutput(self.step, [], {}, {}, self.finished_req_ids, [])
        self.finished_req_ids = []
        for hook in self.hooks:
            for request_id in hook.released():
                self._wait(self.held.pop(request_id))
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        elif trace.on:  # no newcomer may overtake a request that was just preempted
            self._trace_held_back("preempted", budget)
        for hook in self.hooks:
            hook.scheduled(output)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        for hook in self.hooks:
            hook.decided(output)
        if trace.on:
            total, free = output.total_num_scheduled_tokens, self.kv_cache_manager.block_pool.num_free
            budget = self.config.max_num_batched_tokens
            trace.emit("sched.output", step=self.step, total_tokens=total, budget=budget, free_blocks=free)
        return output

    def _limited(self, num_tokens: int, budget: int) -> int:
        """How many of a request's missing tokens this step computes: within the budget, and for a long prompt within
        `long_prefill_token_threshold` while there are other requests."""
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_tokens and len(self.requests) > 1:
            num_tokens = threshold
        return num_tokens if num_tokens < budget else budget

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Schedule the running requests. Returns the budget that is left.

        Requests are preempted from the end of the queue, so none of them is already scheduled in this step.
        """
        for request in self.running:
            if budget <= 0:
                break
            num_tokens = self._limited(request.num_tokens - request.num_computed_tokens, budget)
            for hook in self.hooks:
                num_tokens = hook.limited(request, request.num_computed_tokens, num_tokens)
            if not num_tokens:  # a step in flight computes its last token, or a hook allows none
                continue
            new_blocks = self._allocate_or_preempt(request, num_tokens, output)
            if new_blocks is None:  # the request itself was the last one, and was preempted
                break
            output.new_block_ids[request.request_id] = new_blocks
            budget = self._give(request, num_tokens, new_blocks, output, budget)
        return budget

    def _give(
        self, request: Request, num_tokens: int, new_blocks: list[int], output: SchedulerOutput, budget: int
    ) -> int:
        """Add the tokens to the decision. Returns the budget that is left."""
        output.num_scheduled_tokens[request.request_id] = num_tokens
        if trace.on:
            computed = request.num_computed_tokens
            trace.emit(
                "sched.scheduled", req=request.request_id, step=self.step, num_tokens=num_tokens, num_computed=computed,
                missing=request.num_tokens - computed, budget_left=budget, new_blocks=new_blocks,
            )  # fmt: skip
        return budget - num_tokens

    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """Blocks for the next `num_tokens` tokens of a running request. Preempts from the end of the queue until enough are
        free; returns None if `request` itself was preempted."""
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = self.running.pop()
            self._preempt(victim, output, request)
            if victim is request:
                return None

    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:
        """Free a running request's blocks and make it wait. It will compute its tokens again, unless a hook keeps them."""
        request_id, computed = request.request_id, request.num_computed_tokens
        free_before = self.kv_cache_manager.block_pool.num_free
        kept = False
        for hook in self.hooks:
            kept = hook.preempted(request, output) or kept
        if not kept:  # else it shows how far the request has come; the hook says at its admission what it has of it
            request.num_computed_tokens = 0
        freed = self.kv_cache_manager.free(request_id)
        if trace.on:
            trace.emit(
                "sched.preempt", req=request_id, step=self.step, freed_blocks=freed, num_computed=computed,
                swapped=kept, needed_by=needed_by.request_id, free_before=free_before,
            )  # fmt: skip
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._wait(request)
        output.preempted_req_ids.append(request_id)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order while budget, batch and blocks last. The first that does not fit holds back all
        after it."""
        rule = ""
        for request in self.waiting.in_turn():
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                rule = "budget" if budget <= 0 else "max_num_seqs"
                break
            hits = self.kv_cache_manager.get_computed_blocks(request)
            computed = self._known_tokens(request, len(hits))
            missing = request.num_tokens - computed
            if not self.config.enable_chunked_prefill and missing > budget:
                rule = "no_chunking"
                break
            num_tokens = self._limited(missing, budget)
            for hook in self.hooks:
                num_tokens = hook.limited(request, computed, num_tokens)
            if not num_tokens:
                rule = "hooks"
                break
            new_blocks = self.kv_cache_manager.allocate_slots(request, computed + num_tokens, hits)
            if new_blocks is None:
                rule = "blocks"
                break
            self._admit(request, computed, hits, new_blocks, output)
            budget = self._give(request, num_tokens, new_blocks, output, budget)
        if trace.on and self.num_waiting:
            self._trace_held_back(rule, budget)

    def _known_tokens(self, request: Request, num_hits: int) -> int:
        """How many of the request's tokens need not be computed: those in the `num_hits` blocks of the prefix cache, and what each hook in turn
        has after them."""
        known = num_hits * self.kv_cache_manager.block_size
        for hook in self.hooks:
            known += hook.num_matched(request, known)
        return known

    def _admit(
        self, request: Request, computed: int, hits: list[int], new_blocks: list[int], output: SchedulerOutput
    ) -> None:
        """Move a request from waiting to running, and describe it to the worker."""
        request_id, resumed = request.request_id, request.status == RequestStatus.PREEMPTED
        self.waiting.remove(request)
        known = len(hits) * self.kv_cache_manager.block_size
        for hook in self.hooks:
            num_matched = hook.num_matched(request, known)
            hook.admitted(request, output, new_blocks, known, num_matched)
            known += num_matched
        request.num_computed_tokens = computed
        if not resumed:
            request.num_cached_tokens = computed
            self.stats.prefix_cache_queries += request.num_tokens
            self.stats.prefix_cache_hits += len(hits) * self.kv_cache_manager.block_size
        if trace.on:
            self._trace_admitted(request, hits, new_blocks)
        request.status = RequestStatus.RUNNING
        self.running.add(request)
        output.scheduled_new_reqs.append(
            NewRequestData(
                request_id, request.all_token_ids, request.num_prompt_tokens, request.sampling_params, request.seed,
                new_blocks, computed, request.task,
            )
        )  # fmt: skip

    def _trace_admitted(self, request: Request, hits: list[int], new_blocks: list[int]) -> None:
        """Record that a request was admitted; `new_blocks` begins with the `hits` of the prefix cache."""
        request_id = request.request_id
        if trace.on and hits:
            num_tokens = len(hits) * self.kv_cache_manager.block_size
            trace.emit("sched.prefix_hit", req=request_id, step=self.step, blocks=hits, num_tokens=num_tokens)
        if trace.on and request.status == RequestStatus.PREEMPTED:
            num_tokens = request.num_tokens
            trace.emit("sched.resume", req=request_id, step=self.step, new_blocks=new_blocks, num_tokens=num_tokens)
        elif trace.on:
            prompt = request.num_prompt_tokens
            trace.emit("sched.admit", req=request_id, step=self.step, new_blocks=new_blocks, num_prompt_tokens=prompt)

    def _trace_held_back(self, rule: str, budget: int) -> None:
        """Record why no other request was admitted: `rule` stopped the first one in the queue, and that one stops all behind it. The
        rule is empty if the queue is, and hooks hold back all."""
        first = next((request.request_id for request in self.waiting.in_turn()), None) if rule else None
        others = [request.request_id for request in self.waiting]
        if trace.on:
            trace.emit(
                "sched.held_back", step=self.step, rule=rule, first=first, behind=[each for each in others if each != first],
                held=list(self.held), budget_left=budget, free_blocks=self.kv_cache_manager.block_pool.num_free,
                num_running=len(self.running),
            )  # fmt: skip

    def update_from_output(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append the sampled tokens and end the requests that are complete."""
        outputs: list[EngineCoreOutput] = []
        for hook in self.hooks:
            outputs += hook.executed(output, runner_output)
        for request_id, sampled in runner_output.sampled_token_ids.items():
            request, by = self.requests[request_id], None
            new = request.append_output_tokens(sampled, self.max_model_len)
            new_token_ids = new.new_token_ids
            if request_id in runner_output.logprobs:
                new.new_logprobs = runner_output.logprobs[request_id][: len(new_token_ids)]
            for hook in self.hooks:
                by = hook.sampled(request, new, output, runner_output) or by
            outputs.append(new)
            if trace.on:
                trace.emit(
                    "sched.token", req=request_id, step=output.step, num_tokens=len(new_token_ids), sampled=len(sampled),
                    num_output_tokens=request.num_output_tokens, token_ids=new_token_ids if trace.prompts else [],
                    block_hashes=self.kv_cache_manager.new_block_hashes(request),
                )  # fmt: skip
            if new.finish_reason is not None:
                self._finish(request, new.finish_reason, by or ended_by(new))
        for hook in self.hooks:
            hook.updated(output)
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The state after a step, for the metrics: a copy, because the output thread may encode it during the next step."""
        self.stats.num_running, self.stats.num_waiting = len(self.running), self.num_waiting
        self.stats.kv_cache_usage = self.kv_cache_manager.block_pool.usage
        return msgspec.structs.replace(self.stats)


def ended_by(output: EngineCoreOutput) -> str:
    """The rule that ended a request within a step."""
    if output.finish_reason == FinishReason.LENGTH:
        return "length"
    return "eos" if output.stop_reason is None else "stop_token"
