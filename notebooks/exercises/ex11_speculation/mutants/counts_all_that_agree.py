"""Misconception: each draft stands for itself; but after a wrong one the model has read a text that nobody wrote."""

from __future__ import annotations

from torch import Tensor

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation  # noqa: F401

REJECTED = "before the first that differs"


def num_accepted(sampled: Tensor, drafts: list[list[int]]) -> list[int]:
    counts, place = [], 0
    for draft in drafts:
        counts.append(sum(a == b for a, b in zip(sampled[place:].tolist(), draft)))
        place += len(draft) + 1
    return counts
