"""Misconception: the longest prefix saves most, so it decides."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "nobody is sent where 16 more requests wait"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    return min(candidates, key=lambda each: (-each.cached_blocks, each.score, each.engine)).engine
