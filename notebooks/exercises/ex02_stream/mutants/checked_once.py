"""Misconception: one check for each call of update() is enough; with three tokens in a call the stop string may end in the second."""

from __future__ import annotations

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer as Reference, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream

__all__ = ["ByteLevelStream", "find_stop", "held_back", "server_sent_event"]
REJECTED = "Whether tokens come one at a time or several at once"


class IncrementalDetokenizer(Reference):
    def update(self, new_token_ids: list[int], finished_by_token: bool = False) -> str | None:
        for token_id in new_token_ids[:-1] if finished_by_token and not self._include_stop else new_token_ids:
            self.num_tokens += 1
            if not (self._skip_special and self._tokenizer.is_special(token_id)):
                self.text += self._stream.push(*self._tokenizer.piece(token_id))
        if self._stops and self.num_tokens > self._min_tokens:
            return self._check_stop()
        self._searched = self.safe = len(self.text)
        return None
