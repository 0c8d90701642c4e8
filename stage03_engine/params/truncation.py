"""Cut prompts to a number of tokens."""

from __future__ import annotations

from typing import Any, ClassVar


class Truncation:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "truncate_prompt_tokens": {"input": "stage03_engine.frontend.features.truncation.truncation:Truncation"}
    }
    truncate_prompt_tokens: int | None = None  # keep the last k tokens of the prompt; -1: as many as leave room for one
    truncation_side: str | None = None  # where truncating cuts tokens off: "left" (also None) or "right"

    def check(self: Any) -> None:
        """Raises InvalidRequestError."""
        keep = self.truncate_prompt_tokens
        self._check(keep is None or keep == -1 or keep >= 1, "truncate_prompt_tokens", "-1 or at least 1")
        self._check(self.truncation_side in (None, "left", "right"), "truncation_side", "left or right")
