"""The textbook form of rejection sampling, which the real server need not compute, since its guesser is always certain of its guess;
and the parts that it does compute, which are the project's own."""

from __future__ import annotations

from fractions import Fraction

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer, find_continuation
from stage04_kernels.features.rejection_sampler import num_accepted

__all__ = ["NgramProposer", "acceptance", "find_continuation", "num_accepted", "recovered"]


def acceptance(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    """For each token the probability with which it is accepted if it was drafted."""
    return [min(Fraction(1), p / q) if q else Fraction(1) for p, q in zip(target, draft)]


def recovered(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    """The distribution from which a token is drawn in the place of a rejected one."""
    excess = [max(Fraction(0), p - q) for p, q in zip(target, draft)]
    total = sum(excess)
    return [each / total for each in excess] if total else list(target)
