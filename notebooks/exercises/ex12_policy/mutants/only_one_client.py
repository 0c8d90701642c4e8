"""Misconception: in the turn of one client, the others need not be in the list."""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

REJECTED = "['a', 'b'] in any order"


class Scheduler(Mechanics):
    def schedule(self) -> SchedulerOutput:
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        return super().schedule()

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        return [each for each in waiting if each.cache_salt == waiting[0].cache_salt]

    def running_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival)
