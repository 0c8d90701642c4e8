"""Misconception: bytes that are no text are best left out; the client would never know that the model wrote nonsense."""

from __future__ import annotations

import codecs

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop, held_back

__all__ = ["IncrementalDetokenizer", "find_stop", "held_back", "server_sent_event"]
REJECTED = "as if all bytes were decoded at once"


class ByteLevelStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def push(self, token: str, raw: bytes) -> str:
        return self._decoder.decode(raw)
