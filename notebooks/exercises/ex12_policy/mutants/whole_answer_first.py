"""Misconception: a request is admitted when its longest possible answer fits, so nobody need be preempted."""

from __future__ import annotations

from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Mechanics

REJECTED = "have not ended"


class Scheduler(Mechanics):
    def schedule(self) -> SchedulerOutput:
        self.running[:] = self.running_order(list(self.running))
        self.waiting[:] = self.waiting_order(list(self.waiting))
        return super().schedule()

    def waiting_order(self, waiting: list[Request]) -> list[Request]:
        return sorted(waiting, key=lambda request: request.arrival)

    def running_order(self, running: list[Request]) -> list[Request]:
        return sorted(running, key=lambda request: request.arrival)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        for request in list(self.waiting)[:1]:
            most = request.num_tokens + (request.sampling_params.max_tokens or 0)
            if most <= self.kv_cache_manager.block_pool.num_free * self.kv_cache_manager.block_size:
                super()._schedule_waiting(output, budget)
