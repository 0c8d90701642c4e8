"""Speculation: guess the next tokens, and let one step of the model check all guesses at once.

Where the guesses come from: the text itself (`find_continuation`, `NgramProposer`). What becomes of them: `num_accepted`. Why the
answer stays what it was: `acceptance` and `recovered`, the textbook form, which serves nobody and is exact.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from torch import Tensor

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer as Mechanics


def find_continuation(tokens: np.ndarray, shortest: int, longest: int) -> int | None:
    """Where the last n tokens occurred before: the index after their latest earlier occurrence, for the largest n in
    [shortest, longest] that has one; None if there is none. [1, 2, 3, 1, 2] has 2 for n = 2: the 3 that came after 1, 2.

    tokens [num_tokens], at least one, is the whole text, and must stay as it is. The earlier occurrence may overlap the last n tokens, but
    is not the last n tokens themselves. (A grader runs no file that names np.lib, so none with np.lib.stride_tricks: compare slices.)
    """
    raise NotImplementedError


class NgramProposer(Mechanics):
    """Proposes tokens for a request. Given: self.num_tokens (how many), self.shortest and self.longest (for find_continuation)."""

    def propose(self, tokens: np.ndarray) -> list[int]:
        """What followed the earlier occurrence: self.num_tokens Python ints, or none at all without an occurrence.

        The copy may reach the end of the text. Then it goes on with the tokens that it has just proposed, as if they were part of
        the text: a text that repeats with a period repeats on.
        """
        raise NotImplementedError


def num_accepted(sampled: Tensor, drafts: list[list[int]]) -> list[int]:
    """How many drafts of each request are accepted: all before the first that differs from the token sampled in its place.

    sampled  [num_positions] int64: for a request with k drafts k + 1 positions, request after request. The first is sampled after the
             request's own last token, so it is compared with the first draft; the next after its first draft, and so on. The last
             has no draft to be compared with: if all are accepted, it is one token more, the bonus token.
    drafts   per request a list, perhaps empty
    """
    raise NotImplementedError


def acceptance(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    """For each token the probability with which it is accepted if it was drafted: min(1, target / draft).

    target and draft have a probability for each token of a tiny vocabulary: what the model gives it, and what the guesser gives
    it. A token that the guesser never drafts has 1.
    """
    raise NotImplementedError


def recovered(target: list[Fraction], draft: list[Fraction]) -> list[Fraction]:
    """The distribution from which a token is drawn in the place of a rejected one: the excess of target over draft, max(0, target -
    draft), divided by its sum. Where there is no excess nothing is ever rejected: then return target."""
    raise NotImplementedError
