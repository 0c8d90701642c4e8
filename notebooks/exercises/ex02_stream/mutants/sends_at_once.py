"""Misconception: a stop string is looked for in what is there; whatever holds none can go out."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer as Reference, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "find_stop", "held_back", "server_sent_event"]
REJECTED = "What may be sent holds no beginning"


class IncrementalDetokenizer(Reference):
    def update(self, new_token_ids: list[int], finished_by_token: bool = False) -> str | None:
        stop = super().update(new_token_ids, finished_by_token)
        self.safe = len(self.text)
        return stop
