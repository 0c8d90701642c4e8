"""Misconception: the budget is for each request, not for the step."""

from __future__ import annotations

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "at most 1 tokens"


class Scheduler(Reference):
    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        super()._schedule_running(output, budget)
        return budget
