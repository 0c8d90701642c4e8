"""`--load-format dummy`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="dummy_weights",
    help="random weights, without a download",
    room=__package__,
    parts=(
        Part("weights", ".shapes:DUMMY", key="dummy", help="random weights, nothing is downloaded"),
        Part("engine", ".shapes:KNOWN_SHAPES", key="known_shapes"),
    ),
)
