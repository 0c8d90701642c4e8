"""Misconception: a guess costs nothing, so one equal token is reason enough, whatever prompt_lookup_min says."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import (
    NgramProposer,  # noqa: F401
    find_continuation as reference,
)

REJECTED = "without one there is no guess"


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    return reference(tokens, 1, longest)
