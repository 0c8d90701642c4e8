"""Misconception: a prompt may always be cut, whatever enable_chunked_prefill says."""

from __future__ import annotations

from dataclasses import replace

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "Without chunked prefill a prompt is computed in one step."


class Scheduler(Reference):
    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        config, self.config = self.config, replace(self.config, enable_chunked_prefill=True)
        super()._schedule_waiting(output, budget)
        self.config = config
