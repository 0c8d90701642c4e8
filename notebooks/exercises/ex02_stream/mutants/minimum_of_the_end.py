"""Misconception: a stop string that ends behind the first min_tokens tokens counts, wherever it begins."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer as Reference, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "find_stop", "held_back", "server_sent_event"]
REJECTED = "A stop string that begins in the text of the first min_tokens"


class IncrementalDetokenizer(Reference):
    def _check_stop(self) -> str | None:
        if self.num_tokens == self._min_tokens + 1:
            self._searched = 0
        return super()._check_stop()
