"""`n` and `best_of`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="parallel_sampling",
    help="several answers to one prompt: n, best_of",
    room=__package__,
    also=("stage03_engine.params.best_of",),
    parts=(
        Part("params", "stage03_engine.params.best_of:BestOf"),
        Part("engine", ".parallel_sampling:fan_out", key="fan_out"),
    ),
    events=("request.fanned_out",),
)
