"""How to choose the next token of a request, and when to stop (vllm/sampling_params.py)."""

from __future__ import annotations

import math
from enum import IntEnum

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.structured_outputs import StructuredOutputsParams

MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request contains."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Per-request settings. `top_k` 0 and -1 mean off, `top_p` 1 and `min_p` 0 mean off, `temperature` 0 means greedy.

    Raises InvalidRequestError, naming the field and its range, when a value is impossible.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the end of the context
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # k: the k most likely tokens and the sampled one; 0: the sampled one only
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None  # what every output must match

    def __post_init__(self) -> None:
        # `not (a <= x <= b)` instead of `x < a or x > b`: NaN fails every comparison and must be refused, not let through.
        self._check(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]")
        self._check(self.top_k >= -1, "top_k", "-1 or 0 (off), or at least 1")
        self._check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        self._check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        self._check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        self._check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        self._check(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"in [0, {MAX_LOGPROBS}]")
        self._check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        self._check(all(self.stop), "stop", "without empty strings")

    def _check(self, ok: bool, field: str, allowed: str) -> None:
        if not ok:
            value = getattr(self, field)
            shown = value if not isinstance(value, float) or math.isfinite(value) else str(value)
            raise InvalidRequestError(f"{field} must be {allowed}, got {shown}.", field)

    @property
    def greedy(self) -> bool:
        """True when the next token is the exact argmax (temperatures below 1e-5 count as 0, as in vLLM)."""
        return self.temperature < 1e-5
