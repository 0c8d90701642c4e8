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
    self.requests                  all of them by their ids, whether they wait or run
    self.config                    max_num_batched_tokens, max_num_seqs, enable_chunked_prefill, long_prefill_token_threshold
    request.num_tokens             prompt and output so far; request.num_computed_tokens of them are in the KV cache

    self.kv_cache_manager, with its .block_size and
        .get_computed_blocks(request)                 the blocks (a list) that hold the request's beginning already: the hits
        .allocate_slots(request, num_tokens, hits)    room for its *first* num_tokens tokens, those in the cache included. Returns the
                                                      blocks that it got for that, perhaps []; None, and no change, if too few are
                                                      free. A running request has no hits: leave them out

    self._give(request, num_tokens, new_blocks, output, budget)    enter its tokens into the output; returns the budget that is left
    self._preempt(request, output, needed_by)    take its blocks, note it in output.preempted_req_ids and queue it again. You take it out
                                                 of self.running. needed_by is the request that gets the blocks
    self._admit(request, computed, hits, new_blocks, output)       move it from waiting to running; `computed` of its tokens are there
    self._trace_held_back(rule, budget)          tell it, if anybody still waits, why the first is not admitted: the first of these rules
                                                 that keeps it out, "preempted", "budget", "max_num_seqs", "no_chunking", "blocks";
                                                 budget is what is left

    What features add to the reference's methods (self.hooks) you may leave out.
    """

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: count it (`self.step`, 0 at first), serve the running requests, then admit waiting ones, unless
        somebody was preempted; then count every scheduled token as computed (output.num_scheduled_tokens: id -> tokens).

        Begin with SchedulerOutput(self.step, [], {}, {}, self.finished_req_ids, []). The list finished_req_ids goes out with it, so
        give self.finished_req_ids a new, empty list: clear() would empty the one that is on its way.
        """
        raise NotImplementedError

    def _limited(self, num_tokens: int, budget: int) -> int:
        """How many of a request's missing tokens this step computes: within the budget, and, while there are other
        requests (`self.requests`), within `long_prefill_token_threshold` if that is not 0."""
        raise NotImplementedError

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Serve the running requests in order, while budget is left. Returns the budget that is left.

        Enter the blocks that a request got, also [], into output.new_block_ids[request.request_id]. A request that preempted itself ends the loop.
        """
        raise NotImplementedError

    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """Blocks for the next `num_tokens` tokens of a running request. While there are not enough, preempt the last of
        the running requests; returns None when that was `request` itself."""
        raise NotImplementedError

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in order (`self.waiting.in_turn()`) while there is budget, a seat and blocks.

        A request whose beginning is cached starts after it. The first request that does not fit holds back all after it; then tell
        the trace why.
        """
        raise NotImplementedError
