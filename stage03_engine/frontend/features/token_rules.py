"""Sampling parameters that name tokens or words: checked against the vocabulary, and resolved to token ids."""

from __future__ import annotations

from collections import deque

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook, InputProcessor
from stage03_engine.sampling_params import SamplingParams


class TokenRules(InputHook):
    """`logit_bias`, `allowed_token_ids`, `bad_words`, and the ends of text that `min_tokens` holds back."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Raises InvalidRequestError for ids out of the vocabulary, and if nothing may be written before `min_tokens`."""
        vocab_size, allowed = self.processor.vllm_config.shape.vocab_size, params.allowed_token_ids or []
        if len(allowed) > vocab_size:
            reason = f"allowed_token_ids must name at most {vocab_size} ids, got {len(allowed)}."
            raise InvalidRequestError(reason, "allowed_token_ids")
        self.processor.check_ids("allowed_token_ids", allowed)
        self.processor.check_ids("logit_bias", params.logit_bias)
        named = {*params.stop_token_ids, self.processor.tokenizer.eos_token_id}
        ends = {i for i in named if i is not None and 0 <= i < vocab_size}
        if params.min_tokens and allowed and not set(allowed) - ends:
            raise InvalidRequestError("allowed_token_ids leaves nothing to write before min_tokens.", "min_tokens")
        return msgspec.structs.replace(
            params,
            stop_or_eos_ids=sorted(ends) if params.min_tokens else [],
            bad_words_token_ids=_bad_words(self.processor, params.bad_words),
        )


_RECENT: deque[tuple[InputProcessor, list[str], list[str], list[list[int]]]] = deque(maxlen=4)
"""(who tokenized, the list of a request, the words in it, their tokens)."""


def _bad_words(processor: InputProcessor, words: list[str]) -> list[list[int]]:
    """Each word at the start of a text and in the middle of one, where it has a space before it. Raises InvalidRequestError.

    The prompts of one request share a list, which can take as long as all of them, so it is tokenized once. Another request has
    another list, even of the same words, so the time of an answer does not reveal that somebody sent them before.
    """
    for by, given, then, token_ids in tuple(_RECENT):
        if by is processor and given is words and then == words:
            return token_ids
    texts = {prefix + word.lstrip() for word in words for prefix in ("", " ")}
    made = [processor.tokenize(text, add_special_tokens=False) for text in sorted(texts)]
    _RECENT.append((processor, words, list(words), made))
    return made
