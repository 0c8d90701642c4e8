"""Misconception: it does not matter which occurrence is taken, so why not the first; but a text goes on as it went on last."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer  # noqa: F401

REJECTED = "the latest counts"


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    text = tokens.tolist()
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return start + n
    return None
