"""What beam search asks of each of its steps."""

from __future__ import annotations

from typing import Any

import msgspec


class Candidates:
    """Part of SamplingParams; set by the front end, not by callers."""

    __slots__ = ()
    num_candidates: int = 0  # how many likely tokens a step reports, beyond the limit of `logprobs`

    def check(self: Any) -> None:
        """Refuses nothing."""
        msgspec.structs.force_setattr(self, "num_likely_tokens", self.num_candidates)
