"""Misconception: where somebody waits there is a queue, and no cached prefix is worth queueing for."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "at most half of what they need"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    lowest = min(each.score for each in candidates)
    near = [each for each in candidates if each.score <= lowest + 5]
    return min(near, key=lambda each: (-each.cached_blocks, each.score, each.engine)).engine
