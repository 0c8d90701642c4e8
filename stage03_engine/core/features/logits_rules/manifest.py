"""Penalties, biases, allowed tokens, bad words, min_tokens."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="logits_rules",
    help="sampling parameters that change logits: penalties, biases, allowed tokens, bad words, min_tokens",
    room=__package__,
    also=(
        "stage03_engine.params.logits_rules",
        "stage03_engine.frontend.features.token_rules",
        "stage04_kernels.features.logits_processors",
    ),
    parts=(Part("params", "stage03_engine.params.logits_rules:LogitsRules"),),
)
