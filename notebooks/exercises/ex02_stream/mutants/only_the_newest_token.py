"""Misconception: a stop string is in a token, so it is enough to search the text of the newest."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer as Reference, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "find_stop", "held_back", "server_sent_event"]
REJECTED = "The text ends before its stop string"


class IncrementalDetokenizer(Reference):
    def _check_stop(self) -> str | None:
        self._searched = max(self._searched, getattr(self, "_before", 0))
        self._before = len(self.text)
        return super()._check_stop()
