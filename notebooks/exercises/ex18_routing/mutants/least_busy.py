"""Misconception: an idle engine is always the best one: what it lacks it can compute."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "at most 0.8 of what"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    return min(candidates, key=lambda each: (each.score, -each.cached_blocks, each.engine)).engine
