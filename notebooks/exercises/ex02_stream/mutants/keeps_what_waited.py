"""Misconception: what is held back at the end was never safe, so it is dropped."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer as Reference, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "find_stop", "held_back", "server_sent_event"]
REJECTED = "finish() lets go of what was held back"


class IncrementalDetokenizer(Reference):
    def finish(self) -> None:
        self.text = self.text[: self.safe]
