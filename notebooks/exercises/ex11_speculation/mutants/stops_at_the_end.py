"""Misconception: there is nothing to copy after the end of the text, so the proposal is shorter."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer as Reference, find_continuation

REJECTED = "where the text ends, it goes on with its own guesses"


class NgramProposer(Reference):
    def propose(self, tokens: np.ndarray) -> list[int]:
        start = find_continuation(tokens, self.shortest, self.longest)
        return [] if start is None else tokens[start : start + self.num_tokens].tolist()
