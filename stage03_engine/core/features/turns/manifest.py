"""Queues in which API keys take turns: features need it that do a key's work in a thread."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="turns",
    help="queues in which API keys take turns, for what features do in threads",
    room=__package__,
    also=(__package__ + ".turns",),
)
