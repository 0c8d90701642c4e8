"""How long a token may be."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="token_length",
    help="finds the longest token, so that a prompt that is surely too long is refused before it is tokenized",
    room=__package__,
    parts=(Part("engine", ".token_length:max_token_bytes", key="max_token_bytes"),),
)
