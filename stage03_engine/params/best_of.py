"""`best_of`: more answers are generated than returned (vLLM V0)."""

from __future__ import annotations

from typing import Any

import msgspec


class BestOf:
    """Part of SamplingParams."""

    __slots__ = ()
    best_of: int | None = None  # answers to generate, of which the n most likely are returned

    def check(self: Any) -> None:
        """Raises InvalidRequestError."""
        from stage03_engine.sampling_params import MAX_N  # that module loads this one

        self._check(self.n <= self.best_of <= MAX_N, "best_of", f"in [n, {MAX_N}] = [{self.n}, {MAX_N}]")
        if self.greedy:
            return  # all answers would be equal, so that the one is the best; vLLM, which has dropped the field, ignores it
        self._check(
            self.best_of == self.n or self.output_kind.name == "FINAL_ONLY",
            "best_of",
            "equal to n in a stream: which answers are the best is known at the end",
        )
        msgspec.structs.force_setattr(self, "num_answers", self.best_of)
