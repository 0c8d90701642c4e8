"""The flag of per-request metrics."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.config import option


@dataclass(frozen=True)
class MetricsFlags:
    """Whether answers report how long they waited and took."""

    enable_per_request_metrics: bool = option(
        False, "report in `metrics` how long each answer waited and took; in a stream, with the usage"
    )
