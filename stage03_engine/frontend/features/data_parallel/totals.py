"""What a scheduler counts since its start, kept across the deaths of engines: a counter of the metrics never goes back."""

from __future__ import annotations

import msgspec

from stage03_engine.messages import SchedulerStats, SpecDecodingStats

COUNTED = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits")


def totals_of(stats: SchedulerStats) -> SchedulerStats:
    """What was counted since the start; nothing runs and nothing waits."""
    return SchedulerStats(**{name: getattr(stats, name) for name in COUNTED}, spec_decoding=stats.spec_decoding)


def add_totals(stats: SchedulerStats, earlier: SchedulerStats) -> SchedulerStats:
    """The state of an engine, with what the engines before it had counted."""
    sums = {name: getattr(stats, name) + getattr(earlier, name) for name in COUNTED}
    now, before = stats.spec_decoding, earlier.spec_decoding
    drafts = {name: getattr(now, name) + getattr(before, name) for name in SpecDecodingStats.__struct_fields__}
    return msgspec.structs.replace(stats, **sums, spec_decoding=SpecDecodingStats(**drafts))
