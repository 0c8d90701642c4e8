"""Misconception: the oldest request goes, since it holds most blocks."""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "is the last of the running requests"


class Scheduler(Reference):
    def _allocate_or_preempt(self, request: Request, num_tokens: int, output: SchedulerOutput) -> list[int] | None:
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = self.running.pop(0)
            self._preempt(victim, output, request)
            if victim is request:
                return None
