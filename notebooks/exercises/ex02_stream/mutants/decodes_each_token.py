"""Misconception: a token is text, so decode it."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop, held_back

__all__ = ["IncrementalDetokenizer", "find_stop", "held_back", "server_sent_event"]
REJECTED = "half of one never does"


class ByteLevelStream:
    def __init__(self) -> None:
        pass

    def push(self, token: str, raw: bytes) -> str:
        return raw.decode("utf-8", errors="replace")
