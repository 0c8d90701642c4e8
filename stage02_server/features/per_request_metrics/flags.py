"""The flag of per-request metrics."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class MetricsFlags:
    """What answers tell of their times."""

    enable_per_request_metrics: bool = option(
        False, "tell in `metrics` of each answer how long it waited and took; in a stream with the usage"
    )
