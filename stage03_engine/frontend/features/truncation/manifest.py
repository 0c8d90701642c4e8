"""`truncate_prompt_tokens`."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="truncation",
    help="shortens prompts that are too long",
    room=__package__,
    also=("stage03_engine.params.truncation",),
    parts=(Part("params", "stage03_engine.params.truncation:Truncation"),),
)
