"""`--load-format dummy`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="dummy_weights",
    help="random weights, without a download",
    room=__package__,
    parts=(
        Part("engine", ".dummy_weights:dummy_tensors", key="dummy_weights"),
        Part("engine", ".shapes:KNOWN_SHAPES", key="known_shapes"),
    ),
)
