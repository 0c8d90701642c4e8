"""Misconception: a running request decodes, so it gets one token; the rest of its prompt never comes."""

from __future__ import annotations

from stage03_engine.core.scheduler import Scheduler as Reference

REJECTED = "A running request gets all tokens that it lacks"


class Scheduler(Reference):
    def _limited(self, num_tokens: int, budget: int) -> int:
        running = any(each.num_tokens - each.num_computed_tokens == num_tokens for each in self.running)
        return 1 if running and budget else super()._limited(num_tokens, budget)
