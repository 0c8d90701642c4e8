"""Misconception: whoever takes turns is fair to all engines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from stage03_engine.frontend.features.data_parallel.balancing import Candidate

REJECTED = "whatever was asked before"
TURNS = count()


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    return sorted(each.engine for each in candidates)[next(TURNS) % len(candidates)]
