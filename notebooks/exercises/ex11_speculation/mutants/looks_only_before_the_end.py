"""Misconception: the earlier occurrence must be over when the last n tokens begin; so a text of one repeated token finds nothing."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer  # noqa: F401

REJECTED = "may overlap the end of the text"


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    text = tokens.tolist()
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - 2 * n, -1, -1):
            if text[start : start + n] == text[-n:]:
                return start + n
    return None
