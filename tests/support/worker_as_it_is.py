"""A worker that changes nothing, for engines in other processes too."""

from __future__ import annotations

from stage03_engine.core.worker import Worker


class WorkerAsItIs(Worker):
    pass
