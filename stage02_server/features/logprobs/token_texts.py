"""Tokens as texts, for log-probabilities (vllm/v1/engine/logprobs.py, LogprobsProcessor._verify_tokens)."""

from __future__ import annotations

import codecs
from functools import lru_cache

from stage03_engine.frontend.tokenizer import ByteLevelStream, Tokenizer
from stage03_engine.messages import TokenLogprobs

UNFINISHED = "\ufffd"  # what half a character looks like
MAX_CONTEXT = 4  # tokens; no character has more bytes
MAX_KNOWN = 2**16  # tokens whose texts are remembered: an answer repeats the likely ones


@lru_cache(MAX_KNOWN)
def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text for display."""
    return tokenizer.token_text(token_id)


@lru_cache(MAX_KNOWN)
def bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """The bytes of a token; not to be changed."""
    return list(tokenizer.token_bytes(token_id))


class TokenTexts:
    """The texts of the tokens of one sequence, position by position.

    A character can be spread over several tokens. Those that leave it unfinished have no text, and the one that completes it has
    all of it, so that the texts of a sequence add up to the sequence's text. Bytes that never become a character have none; in the
    sequence's text they are U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the tokens that were chosen last, the newest at the end

    def first(self, token_id: int) -> str:
        """The text of the first token of a prompt, which nothing predicted: it has no position."""
        text, self._before = self._text(token_id), [token_id]
        return text

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


class TokenOffsets:
    """Where each token of a sequence begins in the sequence's text, in characters. A token that begins inside a character has the
    offset of that character.

    `after` are the tokens before the sequence, as in `Tokenizer.stream`.
    """

    def __init__(self, tokenizer: Tokenizer, after: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._stream = tokenizer.stream(after, skip_special_tokens)
        self._given = 0  # characters of the text that the tokens so far have completed

    def next(self, token_id: int) -> int:
        """The offset of the next token. A special token that the text does not show takes no room."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return self._given
        return self.next_shown(token_id)

    def is_next(self, name: str, text: str) -> bool:
        """True if the sequence's text goes on with this one, perhaps after U+FFFD for bytes that wait."""
        rest = text[self._given : self._given + len(name) + MAX_CONTEXT]
        return rest.lstrip(UNFINISHED).startswith(name)

    def next_shown(self, token_id: int) -> int:
        """The same for a token that the text shows."""
        raw = self._tokenizer.token_bytes(token_id)
        given = len(self._stream.push(self._tokenizer.token(token_id), raw))
        # What is more than the token itself is U+FFFD for the bytes before it, which wait no longer.
        before = max(0, given - self._alone(raw))
        self._given += given
        return self._given - given + before

    def _alone(self, raw: bytes) -> int:
        """How many characters the token gives when nothing waits before it. A byte of SentencePiece always becomes a character."""
        if isinstance(self._stream, ByteLevelStream):
            return len(codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw))
        return len(raw.decode("utf-8", errors="replace"))
