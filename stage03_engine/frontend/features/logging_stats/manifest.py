"""The line with statistics in the log."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class StatsInterval:
    """Part of ObservabilityConfig."""

    log_stats_interval: float = option(
        10.0, "seconds from one line with statistics to the next, while there is work", at_least=0.1
    )


FEATURE = Feature(
    name="logging_stats",
    help="a line with throughput and queue lengths every ten seconds",
    room=__package__,
    settings={"ObservabilityConfig": StatsInterval},
    parts=(Part("stats", ".logging_stats:LoggingStatLogger", key="engine"),),
)
