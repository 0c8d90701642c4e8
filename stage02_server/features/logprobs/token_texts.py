"""Tokens as texts, for log-probabilities (vllm/v1/engine/logprobs.py, LogprobsProcessor._verify_tokens)."""

from __future__ import annotations

from functools import lru_cache

from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.messages import TokenLogprobs

UNFINISHED = "\ufffd"  # what half a character looks like
MAX_CONTEXT = 4  # tokens; no character has more bytes
MAX_KNOWN = 2**16  # tokens whose texts are remembered: an answer repeats the likely ones


@lru_cache(MAX_KNOWN)
def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text for display."""
    return tokenizer.token_text(token_id)


class TokenTexts:
    """The texts of the tokens of one sequence, position by position.

    A character can be spread over several tokens. Those that leave it unfinished have no text, and the one that completes it has
    all of it, so that the texts of a sequence add up to the sequence's text. Bytes that never become a character have none; in the
    sequence's text they are U+FFFD. A prompt and its answer are two sequences, and the first token of a prompt, which nothing
    predicts, is no part of one: what it begins stays unfinished.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the tokens that were chosen last, the newest at the end

    def at(self, position: TokenLogprobs) -> dict[int, str]:
        """Token id -> text, of each token that could stand at the next position; the first of them is the chosen one."""
        texts = {token_id: self._text(token_id) for token_id in position.token_ids}
        self._before = [*self._before, position.token_ids[0]][-MAX_CONTEXT:]
        return texts

    def _text(self, token_id: int) -> str:
        text = text_of(self._tokenizer, token_id)
        return self._completed(token_id) if text.endswith(UNFINISHED) else text

    def _completed(self, token_id: int) -> str:
        """The characters that the token completes with those before it; empty if they are still unfinished."""
        for count in range(1, len(self._before) + 1):
            context = self._before[-count:]
            text = self._joined([*context, token_id])
            if text.endswith(UNFINISHED):
                continue
            while context and text_of(self._tokenizer, context[-1]).endswith(UNFINISHED):
                context.pop()
            return text.removeprefix(self._joined(context))  # which ends with a whole character
        return ""

    def _joined(self, token_ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode("utf-8", errors="replace")
