"""`stages trace replay`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="replay",
    help="decide every step of a recording again, without a model, and compare",
    room=__package__,
    parts=(Part("engine", ".replay:Replay", key="replay"),),
)
