"""Misconception: max_num_seqs is checked with > instead of >=."""

from __future__ import annotations

from dataclasses import replace

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "Never more than max_num_seqs requests run."


class Scheduler(Reference):
    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        config, self.config = self.config, replace(self.config, max_num_seqs=self.config.max_num_seqs + 1)
        super()._schedule_waiting(output, budget)
        self.config = config
