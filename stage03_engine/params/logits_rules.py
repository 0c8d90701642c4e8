"""Penalties, biases, allowed tokens and bad words: sampling parameters that change logits."""

from __future__ import annotations

import math
from typing import Any, ClassVar

MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 128  # words, characters of each
REPETITION_PENALTIES = (0.001, 1000.0)  # further out a float32 logit overflows
_INPUT = {"input": "stage03_engine.frontend.features.token_rules:TokenRules"}
_RUNNER = {"runner": "stage03_engine.core.features.logits_rules.logits_rules:LogitsRulesHook"}


class LogitsRules:
    """Part of SamplingParams, whose own field `min_tokens` it handles too."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "frequency_penalty": _RUNNER,
        "presence_penalty": _RUNNER,
        "repetition_penalty": _RUNNER,
        "logit_bias": _INPUT | _RUNNER,
        "allowed_token_ids": _INPUT | _RUNNER,
        "bad_words": _INPUT | _RUNNER,
        "bad_words_token_ids": _RUNNER,
        "min_tokens": _INPUT | _RUNNER,
    }
    WITH_DRAFTS: ClassVar[tuple[str, ...]] = (*HOOKS,)  # each row is told which drafts come before it
    frequency_penalty: float = 0.0  # per occurrence in the output
    presence_penalty: float = 0.0  # once for what the output holds
    repetition_penalty: float = 1.0  # for what the prompt or the output holds; 1: off
    logit_bias: dict[int, float] = {}  # token id -> what is added to its logit, cut to [-100, 100]
    allowed_token_ids: list[int] | None = None  # no other token is allowed
    bad_words: list[str] = []  # texts that are forbidden
    # Set by the front end, not by callers:
    stop_or_eos_ids: list[int] = []  # what min_tokens holds back
    bad_words_token_ids: list[list[int]] = []

    def check(self: Any) -> None:
        """Raises InvalidRequestError. Only the InputProcessor knows whether an id is in the vocabulary."""
        low, high = REPETITION_PENALTIES
        self._check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]")
        self._check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]")
        self._check(low <= self.repetition_penalty <= high, "repetition_penalty", f"in [{low:g}, {high:g}]")
        self._check(all(map(math.isfinite, self.logit_bias.values())), "logit_bias", "a mapping to finite numbers")
        self._check(self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", "not empty")
        self._check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
        self._check(
            all(word.strip() and len(word) <= MAX_BAD_WORD_LENGTH for word in self.bad_words),
            "bad_words",
            f"words of 1 to {MAX_BAD_WORD_LENGTH} characters that are not blank",
        )
