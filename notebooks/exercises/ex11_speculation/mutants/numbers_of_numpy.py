"""Misconception: an int64 of NumPy's is an int; but msgpack, which carries it to the scheduler, knows nothing of it."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer as Reference, find_continuation

REJECTED = "A proposal is a list of Python ints"


class NgramProposer(Reference):
    def propose(self, tokens: np.ndarray) -> list[int]:
        start = find_continuation(tokens, self.shortest, self.longest)
        return [] if start is None else list(np.resize(tokens[start:], self.num_tokens))
