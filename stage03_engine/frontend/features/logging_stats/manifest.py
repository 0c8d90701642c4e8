"""The line with statistics in the log."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="logging_stats",
    help="a line with throughput and queue lengths every ten seconds",
    room=__package__,
    parts=(Part("stats", ".logging_stats:LoggingStatLogger", key="engine"),),
)
