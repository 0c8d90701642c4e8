"""Misconception: what is cached need not be counted, the model computes it again anyway."""

from __future__ import annotations

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "cached tokens"


class Scheduler(Reference):
    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        for request in self.waiting:
            request.skip_reading_prefix_cache = True
        super()._schedule_waiting(output, budget)
