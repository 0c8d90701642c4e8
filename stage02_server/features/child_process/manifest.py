"""A process for risky work: for features that decode or render what strangers send."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="child_process",
    help="a process for what strangers send, which is replaced when it has ended",
    room=__package__,
    also=(__package__ + ".child",),
)
