"""What a step takes besides weights and KV cache."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="memory_profile",
    help="measures at start what the largest step takes, so that the KV cache leaves room for it",
    room=__package__,
    parts=(Part("engine", ".memory_profile:measure_activations", key="measure_activations"),),
)
