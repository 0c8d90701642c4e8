"""Bytes that unfinished requests hold: for features whose requests bring much more than text."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="held_bytes",
    help="a count of the bytes that unfinished requests hold, for what they bring besides text",
    room=__package__,
    also=(__package__ + ".held",),
)
