"""A file of requests."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="batch",
    help="answers a file of requests, as OpenAI's batches do",
    room=__package__,
    parts=(Part("server", ".run_batch:run_batch", key="batch"),),
    events=("batch.finished", "batch.started"),
)
