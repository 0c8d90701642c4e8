"""The first lines of the log."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="start_log",
    help="the log begins with the version, the settings that were given, and a warning if the weights are random",
    room=__package__,
    parts=(Part("engine", ".start_log:say", key="start_log"),),
)
