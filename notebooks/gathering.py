"""A scheduler for recordings: it decides like the real one, but begins only when everybody is there.

When clients arrive one by one, it depends on the machine in which step each is seen. Here the engine idles until all have
arrived, and (for a run about a client that leaves) once more until that client has left. So recording again gives the same
decisions. `trace/record.py` sets the two environment variables.
"""

from __future__ import annotations

import os
from typing import Any

from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput, FinishReason


class Closed(SchedulerHook):
    """No step while the scheduler idles, also when a message asks for its numbers."""

    def poll(self) -> tuple[list[EngineCoreOutput], bool]:
        """Whether any request can run."""
        return [], self.scheduler.has_unfinished_requests


class Gathering(Scheduler):
    """Idles before the first step until GATHER_REQUESTS requests have arrived, and behind step GATHER_ABORT_STEP until one of
    them was aborted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._expected = int(os.environ.get("GATHER_REQUESTS", "1"))
        self._abort_step = int(os.environ.get("GATHER_ABORT_STEP", "0"))
        self.hooks.append(Closed(self, None))  # type: ignore[arg-type]  # it needs no configuration

    @property
    def has_unfinished_requests(self) -> bool:
        """What the busy loop asks before each step."""
        return self._expected <= 0 and not 0 < self._abort_step <= self.step and bool(self.requests)

    def add_request(self, request: Request) -> None:
        """One less to wait for."""
        super().add_request(request)
        self._expected -= 1

    def finish_requests(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """The client that was waited for has left."""
        super().finish_requests(request_ids, reason)
        if request_ids:
            self._abort_step = 0
