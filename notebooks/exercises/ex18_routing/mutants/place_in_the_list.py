"""Misconception: engines are numbered from 0 on, so the number is the place in the list. Until one dies."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "one of the engines that it was given"


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    return min(
        range(len(candidates)), key=lambda i: (-candidates[i].cached_blocks, candidates[i].score, candidates[i].engine)
    )
