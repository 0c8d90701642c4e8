"""The metrics behind /metrics."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="prometheus",
    help="counts and times of all requests, for /metrics",
    room=__package__,
    parts=(
        Part("stats", ".prometheus:PrometheusStatLogger", key="server"),
        Part("routes", ".prometheus:install"),
    ),
)
