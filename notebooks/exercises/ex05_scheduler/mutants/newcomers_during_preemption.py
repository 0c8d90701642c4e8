"""Misconception: blocks that a preempted request gave back may go to a newcomer at once."""

from __future__ import annotations

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "nobody admitted beside the preempted"


class Scheduler(Reference):
    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        budget = super()._schedule_running(output, budget)
        if output.preempted_req_ids:
            super()._schedule_waiting(output, budget)
        return budget
