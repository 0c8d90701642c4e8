"""The scheduler: who gets how many tokens in this step.

What moves a request from one queue to the other, and tells the trace, is given (`Mechanics`); the decisions are yours.
"""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics


class Scheduler(Mechanics):
    """Continuous batching under one token budget.

    Given, for you to call:
    self.waiting, self.running     the queues, in the order of the policy: iterate, len(), .pop() takes the last
    self.config                    max_num_batched_tokens, max_num_seqs, enable_chunked_prefill, long_prefill_token_threshold
    self.kv_cache_manager          get_computed_blocks(request), allocate_slots(request, num_tokens, hits), block_size
    self._give(...)                enter the tokens of a request into the output; returns the budget that is left
    self._preempt(...)             take a running request's blocks, and queue it again
    self._admit(...)               move a request from waiting to running
    self._trace_output(output)     tell the trace that the step is decided: the last thing in schedule()
    self._trace_held_back(rule, budget, {})   tell it why the first waiting request is not admitted: rule is "preempted",
                                   "budget", "max_num_seqs", "no_chunking" or "blocks"
    request.num_tokens             prompt and output so far; request.num_computed_tokens of them are in the KV cache
    """

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: count it (`self.step`), serve the running requests, then admit waiting ones, unless
        somebody was preempted; then count every scheduled token as computed, and tell the trace.

        Begin with SchedulerOutput(self.step, [], {}, {}, self.finished_req_ids, []), and empty that list for the next step.
        """
        raise NotImplementedError

    def _limited(self, num_tokens: int, budget: int) -> int:
        """How many of a request's missing tokens this step computes: within the budget, and, while there are other
        requests (`self.requests`), within `long_prefill_token_threshold` if that is not 0."""
        raise NotImplementedError

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Serve the running requests in order, while budget is left. Returns the budget that is left.

        Enter the blocks that a request got into output.new_block_ids. A request that preempted itself ends the loop.
        """
        raise NotImplementedError

    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """Blocks for the next `num_tokens` tokens of a running request. While there are not enough, preempt the last of
        the running requests; returns None when that was `request` itself."""
        raise NotImplementedError

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order (`self.waiting.in_turn()`) while there is budget, a seat and blocks.

        A request whose beginning is cached starts after it; one that was preempted and kept its tokens after those. The
        first request that does not fit holds back all after it.
        """
        raise NotImplementedError
