"""Misconception: an engine is as busy as the requests that it computes; those that wait cost nothing yet."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "and is worse in nothing"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    return min(candidates, key=lambda each: (each.running - each.cached_blocks, each.engine)).engine
