"""Misconception: shortest first is the best of all policies: nothing has a smaller mean."""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

REJECTED = "an old request with a prompt of 40, then"


class Scheduler(Mechanics):
    def schedule(self) -> SchedulerOutput:
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        return super().schedule()

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        return sorted(waiting, key=lambda request: (request.num_tokens, request.arrival))

    def running_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival)
