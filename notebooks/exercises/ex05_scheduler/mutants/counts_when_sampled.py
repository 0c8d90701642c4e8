"""Misconception: a token is computed when the model has run; so two steps in a row schedule the same tokens."""

from __future__ import annotations

from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "computed tokens"


class Scheduler(Reference):
    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens -= num_tokens
        return output
