"""SentencePiece vocabularies (Llama 2, Mistral, Gemma): from token ids to text, one at a time, as the tokenizer's own decoder
does it for the whole.

Such a vocabulary holds text in which "▁" is a space; it spells characters outside the vocabulary in bytes, one token <0xNN>
each, and the first space of the whole text is not part of it. (vLLM: `DecodeStream`; transformers: LlamaTokenizer.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Decoder:
    """How a tokenizer.json turns tokens into text."""

    byte_fallback: bool = False  # <0xNN> is a byte
    strips_space: bool = False  # the first space of the whole text
    strips_token: bool = False  # every space of the first token

    def byte_of(self, token: str) -> int | None:
        """The byte that a token <0xNN> stands for; None for any other."""
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return int(match[1], 16) if match else None

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token stands for."""
        byte = self.byte_of(token)
        return token.replace(SPACE, " ").encode() if byte is None else bytes([byte])

    def stream(self, after: str) -> SentencePieceStream:
        """For the text of tokens that follow the token `after`; it is empty if they are the first."""
        return SentencePieceStream(self, bool(after))


def read_decoder(steps: list[dict[str, Any]], backend: Any) -> Decoder | None:
    """The decoder that `steps` (the part "decoder" of a tokenizer.json) describe; None if it is not supported."""
    kinds = [step["type"] for step in steps]
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return Decoder(strips_token=steps[0].get("prepend_scheme", "always") != "never")
    if kinds[:1] != ["Replace"] or steps[0]["pattern"] != {"String": SPACE} or steps[0]["content"] != " ":
        return None
    if kinds[1:] not in (["Fuse"], ["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse", "Strip"]):
        return None
    strip = steps[-1] if kinds[-1] == "Strip" else None
    if strip is not None and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    return Decoder(byte_fallback="ByteFallback" in kinds, strips_space=strip is not None)


class SentencePieceStream:
    """Tokens in, text out; only the bytes of an unfinished character wait.

    The tokenizers library turns a whole row of <0xNN> tokens into U+FFFD, one for each byte, when the row is not valid UTF-8.
    Here characters that were complete before the invalid byte stay: they are shown at once, because a line break is such a
    token in these vocabularies, and a stop string must not wait for what follows it. That is the one difference.
    """

    def __init__(self, decoder: Decoder, after_text: bool) -> None:
        self._decoder = decoder
        self._first = not after_text
        self._waiting = b""  # the beginning of a character
        self._broken = False  # this row of bytes is not valid: all the rest of it becomes U+FFFD

    def push(self, token: str, raw: bytes) -> str:
        """The text that `token` adds; `raw` are its bytes. An empty token is an id outside the vocabulary."""
        if not token:
            return ""
        if self._decoder.byte_of(token) is not None:
            return self._strip(self._push_byte(raw))
        text = "\ufffd" * len(self._waiting)
        self._waiting, self._broken = b"", False
        if self._first and self._decoder.strips_token:
            self._first = False
            return token.replace(SPACE, "")
        return self._strip(text + raw.decode())

    def _push_byte(self, raw: bytes) -> str:
        if self._broken:
            return "\ufffd"
        self._waiting += raw
        try:
            text = self._waiting.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            text, self._broken = "\ufffd" * len(self._waiting), True
        self._waiting = b""
        return text

    def _strip(self, text: str) -> str:
        if not self._first or not text:
            return text
        self._first = False
        return text.removeprefix(" ") if self._decoder.strips_space else text
