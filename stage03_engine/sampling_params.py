"""How to choose the next token of a request, and when to stop (vllm/sampling_params.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.mixins import struct_of
from stage03_engine.plugins import loaded

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 4, 1024  # strings, characters of each
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 128  # answers to one prompt


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a request contains."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Per-request settings; features add theirs.

    `top_k` 0 and -1 mean off, `top_p` 1 and `min_p` 0 mean off, `temperature` 0 means greedy.

    Raises InvalidRequestError, naming the field and its range, if a value is impossible.
    """

    n: int = 1  # answers to return
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # answer i takes seed + i
    max_tokens: int | None = 16  # None: up to the end of the context
    min_tokens: int = 0  # no end-of-text, stop token or stop string ends the output earlier
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # k: the k most likely tokens and the sampled one; 0: the sampled one only
    logprob_token_ids: list[int] | None = None  # with logprobs: report these tokens, not the most likely ones
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # byte-level tokenizers write none either way
    stream_interval: int | None = None  # tokens from one output of a stream to the next; None: --stream-interval
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    # Computed from the others:
    num_answers: int = 1  # sequences to generate for the prompt
    num_likely_tokens: int | None = None  # how many of the likeliest tokens each step reports; None: no logprobs at all

    HOOKS: ClassVar[dict[str, dict[str, str]]] = {}
    """Feature's field -> seam ("input", "scheduler", "runner") -> the hook ("module:Class") that handles it there."""
    CHECKS: ClassVar[list[tuple[dict[str, Any], Callable[[SamplingParams], None]]]] = []
    """A feature's fields with their defaults, and the check for requests that use them (see `struct_of`)."""

    if TYPE_CHECKING:  # the fields of features are added below

        def __init__(self, **settings: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        # `not (a <= x <= b)` instead of `x < a or x > b`: NaN fails every comparison and must be refused, not let through.
        self._check(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]")
        self._check(self.top_k >= -1, "top_k", "-1 or 0 (off), or at least 1")
        self._check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        self._check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        self._check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        self._check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        self._check(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"in [0, {MAX_LOGPROBS}]")
        self._check(self.stream_interval is None or self.stream_interval >= 1, "stream_interval", "at least 1")
        self._check_tokens()
        self._check(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]")
        msgspec.structs.force_setattr(self, "num_answers", self.n)
        likely = self.logprobs if self.logprob_token_ids is None else 0
        msgspec.structs.force_setattr(self, "num_likely_tokens", likely)
        for defaults, check in self.CHECKS:
            if any(getattr(self, field) != default for field, default in defaults.items()):
                check(self)
        if self.num_answers == self.n:
            self._check(self.n == 1 or not self.greedy, "n", "1 when the temperature is 0 (all would be equal)")
        if self.seed is not None:
            self._check(self.seed + self.num_answers - 1 < 2**63, "seed", "a 64-bit integer also for the last answer")
        self._check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        self._check(all(self.stop), "stop", "without empty strings")
        short = all(len(stop) <= MAX_STOP_LENGTH for stop in self.stop)
        self._check(short, "stop", f"strings of at most {MAX_STOP_LENGTH} characters")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
        self._check(few, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")

    def _check_tokens(self) -> None:
        """Fields that name or count tokens. Only the InputProcessor knows whether an id is in the vocabulary."""
        self._check(
            not self.min_tokens or "min_tokens" in self.HOOKS, "min_tokens", "0: this engine was built without it"
        )
        named = self.logprob_token_ids
        self._check(named is None or self.logprobs is not None, "logprob_token_ids", "given together with logprobs")
        few = named is None or len(named) <= MAX_LOGPROB_TOKEN_IDS
        self._check(few, "logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} ids")
        if self.max_tokens is None:
            self._check(self.min_tokens >= 0, "min_tokens", "at least 0")
        else:
            allowed = f"in [0, {self.max_tokens}], the upper end being the most tokens that may come"
            self._check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", allowed)

    def _check(self, ok: bool, field: str, allowed: str) -> None:
        if not ok:
            shown = str(getattr(self, field))
            shown = shown if len(shown) <= 100 else shown[:100] + "..."
            raise InvalidRequestError(f"{field} must be {allowed}, got {shown}.", field)

    @property
    def num_logprobs(self) -> int | None:
        """How many tokens each step reports besides the sampled one; None: no logprobs at all."""
        return self.num_likely_tokens if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def greedy(self) -> bool:
        """True when the next token is the exact argmax (temperatures below 1e-5 count as 0, as in vLLM)."""
        return self.temperature < 1e-5

    def hooks(self, seam: str) -> list[str]:
        """The hooks at `seam` of the features whose fields this request uses, each once."""
        return list(dict.fromkeys(seams[seam] for _, seams in self.used() if seam in seams))

    def used(self) -> Iterator[tuple[str, dict[str, str]]]:
        """The fields of features that this request uses, with their hooks."""
        return ((name, seams) for name, seams in self.HOOKS.items() if getattr(self, name) != getattr(_DEFAULTS, name))


if not TYPE_CHECKING:
    SamplingParams = struct_of(SamplingParams, loaded("params"))

_DEFAULTS = SamplingParams()
