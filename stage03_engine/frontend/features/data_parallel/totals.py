"""What schedulers have counted since the server started. A counter of the metrics never goes back, so the counts outlive their engines."""

from __future__ import annotations

import msgspec

from stage03_engine.messages import SchedulerStats

COUNTED = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")


class Totals:
    """The counts of each engine number: those of all engines that have had it."""

    def __init__(self) -> None:
        self._now: dict[int, SchedulerStats] = {}
        self._earlier: dict[int, SchedulerStats] = {}  # of the engines before the one that runs now

    def add(self, engine: int, stats: SchedulerStats) -> SchedulerStats:
        """The state of an engine, its counts added to those of its predecessors."""
        earlier = self._earlier.get(engine)
        self._now[engine] = stats if earlier is None else _sum(stats, earlier)
        return self._now[engine]

    def engine_ended(self, engine: int) -> SchedulerStats:
        """Keep its counts for the next engine with this number. Returns them; nothing runs and nothing waits any more."""
        last = self._now.get(engine, SchedulerStats())
        kept = SchedulerStats(**{name: getattr(last, name) for name in COUNTED}, counts=last.counts)
        self._now[engine] = self._earlier[engine] = kept
        return kept


def _sum(stats: SchedulerStats, earlier: SchedulerStats) -> SchedulerStats:
    counts = {name: getattr(stats, name) + getattr(earlier, name) for name in COUNTED}
    summed = msgspec.structs.replace(stats, **counts)
    summed.count(**earlier.counts)
    return summed
