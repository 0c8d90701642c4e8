"""Misconception: k drafts have k samples; so every request after the first is compared with the wrong ones."""

from __future__ import annotations

from itertools import takewhile

from torch import Tensor

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation  # noqa: F401

REJECTED = "the next request's begin after them"


def num_accepted(sampled: Tensor, drafts: list[list[int]]) -> list[int]:
    counts, place = [], 0
    for draft in drafts:
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(sampled[place:].tolist(), draft))
        counts.append(len(list(equal)))
        place += len(draft)
    return counts
