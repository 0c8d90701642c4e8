"""Misconception: a lottery is fair, since nobody can foresee it."""

from __future__ import annotations

import random
from itertools import count

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

REJECTED = "The same load leads to the same decisions"
DRAWS = count()


class Scheduler(Mechanics):
    def schedule(self) -> SchedulerOutput:
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        return super().schedule()

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        return random.Random(next(DRAWS)).sample(waiting, len(waiting))

    def running_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival)
