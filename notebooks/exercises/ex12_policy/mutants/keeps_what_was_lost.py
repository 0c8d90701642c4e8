"""Misconception: a preempted request goes on where it stopped: its tokens have been computed."""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

REJECTED = "has its place in a block"


class Scheduler(Mechanics):
    def schedule(self) -> SchedulerOutput:
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        return super().schedule()

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        return sorted(waiting, key=lambda request: request.arrival)

    def running_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival)

    def _preempt(self, request: Request, output: SchedulerOutput, needed_by: Request) -> None:
        request.stopped_at = request.num_computed_tokens
        super()._preempt(request, output, needed_by)

    def _known_tokens(self, request: Request, num_hits: int) -> int:
        return max(super()._known_tokens(request, num_hits), getattr(request, "stopped_at", 0))
