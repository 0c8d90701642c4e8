"""Routes that cannot apply here."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="refusals",
    help="says of vLLM's other routes why they are not here",
    room=__package__,
    parts=(Part("answers", ".refusals:install"),),  # after all other routes
)
