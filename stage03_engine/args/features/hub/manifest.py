"""Models on the Hugging Face hub."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="hub",
    help="models of the Hugging Face hub, and of its cache",
    room=__package__,
    parts=(Part("engine", ".hub:find_by_id", key="hub"),),
)
