"""The live view of the scheduler."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="scheduler_watch",
    help="shows watchers what the scheduler does, step by step, without a recording",
    room=__package__,
    also=("stage03_engine.frontend.features.engine_watch",),
    parts=(
        Part("call", ".scheduler_watch:watch_scheduler", key="watch_scheduler"),
        Part("call", ".scheduler_watch:unwatch_scheduler", key="unwatch_scheduler"),
    ),
    events=("sched.state",),
)
