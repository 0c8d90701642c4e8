"""Misconception: of equals any will do, such as the first."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "The order in which they are given"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    lowest = min(each.score for each in candidates)
    near = [each for each in candidates if each.score <= lowest + 16]
    return min(near, key=lambda each: (-each.cached_blocks, each.score)).engine
