"""/tokenize and /detokenize."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="tokenize",
    help="/tokenize and /detokenize",
    room=__package__,
    parts=(Part("routes", ".tokenize:install", paths={"/tokenize": "", "/detokenize": ""}, late=True),),
)
