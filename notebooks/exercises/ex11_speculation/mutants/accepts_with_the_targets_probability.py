"""Misconception: a draft is accepted with the probability that the model gives it. That is right only for a guesser who is certain."""

from __future__ import annotations

from fractions import Fraction

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation  # noqa: F401
from stage04_kernels.features.rejection_sampler import num_accepted  # noqa: F401

REJECTED = "with probability min(1, target / draft)"


def acceptance(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    return [p if q else Fraction(1) for p, q in zip(target, draft)]
