"""What beam search asks of each of its steps."""

from __future__ import annotations

from typing import Any


class Candidates:
    """Part of SamplingParams; set by the front end, not by callers."""

    __slots__ = ()
    num_candidates: int = 0  # how many likely tokens a step reports, beyond the limit of `logprobs`

    @property
    def num_likely_tokens(self: Any) -> int | None:
        """How many of the likeliest tokens each step reports; None: no logprobs at all."""
        return 0 if self.logprob_token_ids is not None else self.num_candidates or self.logprobs
