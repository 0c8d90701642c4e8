"""A connector for tests: offloading whose answers come late, out of order, or never, and whose worker says late and out of order what it has saved."""

from __future__ import annotations

import random
from concurrent.futures import Future
from threading import Timer

from stage03_engine.core.features.kv_transfer.base import Match
from stage03_engine.core.features.kv_transfer.offloading import OffloadingConnectorScheduler
from stage03_engine.core.features.kv_transfer.offloading_copies import OffloadingConnectorWorker
from stage03_engine.core.request import Request

rng = random.Random()
"""Decides what happens; a test seeds it."""
seen: set[str] = set()
"""What has happened."""


class SlowScheduler(OffloadingConnectorScheduler):
    """The scheduler's side."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """An answer, a Future that is done after up to 4 ms, or one that nobody keeps."""
        found = super().get_num_new_matched_tokens(request, num_computed_tokens, may_wait)
        fate = rng.choice(("at once", "late", "late", "never"))
        seen.add(fate if may_wait else fate + " when the time was over")
        if fate == "at once" or (fate == "late" and not may_wait):
            return found
        answer = Future[None]()
        if fate == "late":
            timer = Timer(rng.random() * 0.004, answer.set_result, [None])
            timer.daemon = True
            timer.start()
        return answer


class SlowWorker(OffloadingConnectorWorker):
    """The worker's side."""

    _kept: list[int] = []

    def get_finished(self, wait_seconds: float) -> list[int]:
        """About half of what is saved, in any order; the others another time."""
        blocks = [*self._kept, *super().get_finished(wait_seconds)]
        rng.shuffle(blocks)
        count = (len(blocks) + 1) // 2 if wait_seconds else rng.randint(0, len(blocks))
        seen.add("kept" if count < len(blocks) else "named")
        self._kept = blocks[count:]
        return blocks[:count]
