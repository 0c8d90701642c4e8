"""Misconception: a rejected guess is replaced by an ordinary draw; then whatever was guessed comes too often."""

from __future__ import annotations

from fractions import Fraction

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation  # noqa: F401
from stage04_kernels.features.rejection_sampler import num_accepted  # noqa: F401

REJECTED = "exactly the probability that the target gives it"


def acceptance(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    return [min(Fraction(1), p / q) if q else Fraction(1) for p, q in zip(target, draft)]


def recovered(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    return list(target)
