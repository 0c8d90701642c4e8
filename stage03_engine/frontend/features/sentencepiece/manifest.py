"""Tokenizers that are not byte-level."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="sentencepiece",
    help="decodes the tokens of SentencePiece's vocabularies",
    room=__package__,
    parts=(Part("engine", ".sentencepiece:read_decoder", key="decoder"),),
)
