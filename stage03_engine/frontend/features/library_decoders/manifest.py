"""Tokenizers of other kinds, as far as their text only grows."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="library_decoders",
    help="decodes the tokens of WordPiece and of other vocabularies, as the tokenizers library does",
    room=__package__,
    parts=(Part("engine", ".library_decoders:read_decoder", key="library_decoder"),),
)
