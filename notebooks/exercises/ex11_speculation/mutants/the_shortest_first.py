"""Misconception: two equal tokens are as good a sign as four."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import (
    NgramProposer,  # noqa: F401
    find_continuation as reference,
)

REJECTED = "The longest n-gram that occurs earlier decides"


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    found = (reference(tokens, n, n) for n in range(shortest, longest + 1))
    return next((start for start in found if start is not None), None)
