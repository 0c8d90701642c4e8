"""The hook that handles the sampling parameters that change logits. Their fields are SamplingParams' own."""

from __future__ import annotations

from typing import ClassVar

_HOOK = {"runner": "stage03_engine.core.features.logits_rules:LogitsRulesHook"}


class LogitsRules:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "frequency_penalty": _HOOK,
        "presence_penalty": _HOOK,
        "repetition_penalty": _HOOK,
        "logit_bias": _HOOK,
        "allowed_token_ids": _HOOK,
        "bad_words": _HOOK,
        "bad_words_token_ids": _HOOK,
        "min_tokens": _HOOK,
    }
