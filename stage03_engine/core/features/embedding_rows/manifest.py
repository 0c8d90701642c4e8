"""Rows that take the place of token embeddings: features need it whose prompts hold more than tokens."""

from __future__ import annotations

from stage03_engine.plugins import Feature

FEATURE = Feature(
    name="embedding_rows",
    help="rows in place of token embeddings, for what features put into prompts besides tokens",
    room=__package__,
    also=(__package__ + ".rows",),
)
