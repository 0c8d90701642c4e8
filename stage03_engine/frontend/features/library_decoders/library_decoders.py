"""Vocabularies that are neither byte-level nor SentencePiece's (WordPiece, BPE with a suffix for the end of a word, ...): the decoder of
the tokenizers library reads each token behind those that came just before it.

Slower than the other two by a call of the library for each token. (vLLM: `DecodeStream`, which keeps the same window for every vocabulary.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

GROWING = {None, "WordPiece", "BPEDecoder", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
"""Steps after which a text goes on where it was when a token is added. None: there is no decoder, and spaces join the tokens."""
UNFINISHED = "\ufffd"  # what half a character looks like
PATIENCE = 8  # tokens that may wait for the rest of a character, or add nothing
BEFORE = "x"  # stands for any token before

Decode = Callable[[list[str]], str]


class Decoder:
    """How a tokenizer.json turns tokens into text."""

    byte_fallback = False  # the vocabulary may lack a byte, so that nothing bounds the characters of one token

    def __init__(self, decode: Decode, suffix: str) -> None:
        self._decode, self._suffix = decode, suffix

    def token_bytes(self, token: str) -> bytes:
        """What a token adds to a text, with the space before it; or after it, where a suffix says that a word ends."""
        if not token:
            return b""
        if self._suffix:
            return token.replace(self._suffix, " ").encode()
        return self._decode([BEFORE, token]).removeprefix(self._decode([BEFORE])).encode()

    def stream(self, after: str) -> WindowStream:
        """For the text of tokens that follow the token `after`; it is empty if they are the first."""
        return WindowStream(self._decode, [after] if after else [])


class WindowStream:
    """Tokens in, text out.

    Invariant: `_window` are the tokens since the last but one place at which the text was whole, and `_given` is the text of those up to the
    last one. The text of a token depends on one token before it at most, and on those of the same character.
    """

    def __init__(self, decode: Decode, before: list[str]) -> None:
        self._decode, self._window, self._new = decode, before, len(before)
        self._given = decode(before) if before else ""

    def push(self, token: str, raw: bytes) -> str:
        """See TokenStream."""
        if not token:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        added = text.removeprefix(self._given)
        if (not added or text.endswith(UNFINISHED)) and len(self._window) - self._new < PATIENCE:
            return ""
        self._window = self._window[self._new :]
        self._new = len(self._window)
        self._given = self._decode(self._window)
        return added


def read_decoder(steps: list[dict[str, Any]], backend: Backend) -> Decoder | None:
    """The decoder of this tokenizer, whose `steps` these are; None if a token may change the text before it."""
    shrinks = any(step["type"] == "Strip" and step["stop"] for step in steps)
    if shrinks or not {step["type"] for step in steps} <= GROWING:
        return None
    suffix = next((step["suffix"] for step in steps if step["type"] == "BPEDecoder"), "")
    return Decoder(" ".join if backend.decoder is None else backend.decoder.decode, suffix)
