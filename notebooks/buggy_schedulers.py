"""Three schedulers with one planted bug each, for `12_debug_with_a_trace`. Every answer that they give is right: only
who waits, and for how long, is wrong. Do not read on if you want to find the bugs in the recordings.

    stages serve gpt2-tiny --scheduler-cls buggy_schedulers:Overtaken   (with notebooks/ on PYTHONPATH)
"""

from __future__ import annotations

from gathering import Gathering

from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.messages import FinishReason


class Overtaken(Gathering):
    """The bug: a preempted request counts as if it had just arrived, so all that wait overtake it, and when it is back it is the
    first to be sent away again."""

    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:
        request.arrival = next(self._arrivals)
        super()._preempt(request, output, needed_by)


class Leaking(Gathering):
    """The bug: the blocks of a request that a client aborts are forgotten instead of freed, so the cache shrinks for ever."""

    def _finish(self, request: Request, reason: FinishReason, by: str) -> None:
        if by == "outside":
            self.kv_cache_manager.tables.pop(request.request_id, None)
        super()._finish(request, reason, by)


class Stalling(Gathering):
    """The bug: who lacks most tokens goes first, so while a long prompt is computed nobody else gets a token."""

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        for request in sorted(self.running, key=lambda r: r.num_computed_tokens - r.num_tokens):
            if request.status != RequestStatus.RUNNING or budget == 0:
                continue  # sent away a moment ago, for another one
            num_tokens = self._limited(request.num_tokens - request.num_computed_tokens, budget)
            new_blocks = self._allocate_or_preempt(request, num_tokens, output)
            if new_blocks is None:
                break
            output.new_block_ids[request.request_id] = new_blocks
            budget = self._give(request, num_tokens, new_blocks, output, budget)
        return budget
