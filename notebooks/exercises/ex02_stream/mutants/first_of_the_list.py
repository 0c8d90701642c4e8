"""Misconception: the first stop string of the list that is found is the one that counts."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "IncrementalDetokenizer", "held_back", "server_sent_event"]
REJECTED = "the one that begins first counts"


def find_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    return next(((text.find(stop, start), stop) for stop in stops if stop in text[start:]), None)
