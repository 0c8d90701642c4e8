"""Misconception: hold back as many characters as the longest stop string has, less one: right, but text comes late."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "IncrementalDetokenizer", "find_stop", "server_sent_event"]
REJECTED = "Held back is the longest end of the text"


def held_back(text: str, stops: list[str]) -> int:
    return min(len(text), max((len(stop) - 1 for stop in stops), default=0))
