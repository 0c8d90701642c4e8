"""Misconception: a line break ends an event; but only the empty line does."""

from __future__ import annotations

from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "IncrementalDetokenizer", "find_stop", "held_back"]
REJECTED = "two line breaks."


def server_sent_event(data: bytes) -> bytes:
    return b"data: %b\n" % data
