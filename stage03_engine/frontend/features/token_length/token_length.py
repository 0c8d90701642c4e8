"""How long a token can be: what bounds the number of tokens of a text before it is tokenized.

`characters <= tokens * max_token_bytes` lets the front end refuse megabytes at once. It only holds for a tokenizer that
drops nothing; where it may not hold, the bound is infinite. vLLM has such a check in its renderer, with a fixed number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from stage03_engine.frontend.tokenizer import byte_of_symbol

if TYPE_CHECKING:
    from stage03_engine.frontend.features.sentencepiece.sentencepiece import Decoder

_KEEPING_NORMALIZERS = {"Prepend": 1, "Replace": 1, "ByteLevel": 1, "NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4}
"""Normalizer -> how many characters may become one (NFC puts a letter and its accents together, four at most)."""
_KEEPING_SPLITTERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}


def _steps(state: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer, or the parts of a sequence of them."""
    if state is not None:
        for part in state[key] if state["type"] == "Sequence" else [state]:
            yield from _steps(part, key) if part["type"] == "Sequence" else [part]


def _shrinking(backend: Backend) -> int | None:
    """How many characters of a text may become one before it is split into tokens; None: any number may vanish."""
    factor = 1
    for step in _steps(json.loads(backend.normalizer.__getstate__()) if backend.normalizer else None, "normalizers"):
        if step["type"] not in _KEEPING_NORMALIZERS:
            return None
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        factor *= _KEEPING_NORMALIZERS[step["type"]]
    splitter = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else None
    for step in _steps(splitter, "pretokenizers"):
        if step["type"] not in _KEEPING_SPLITTERS or step.get("behavior") == "Removed":
            return None
    return factor


def _knows_every_byte(vocabulary: dict[str, int], decoder: Decoder | None) -> bool:
    """Without that, characters outside the vocabulary vanish, or many of them become one unknown token."""
    if decoder is None:
        return all(symbol in vocabulary for symbol in byte_of_symbol())
    return decoder.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def max_token_bytes(backend: Backend, decoder: Decoder | None) -> int:
    """The most bytes of one token, and the most characters of a text that can become one token (`decoder` is None for a
    byte-level vocabulary); sys.maxsize if there is no such number."""
    vocabulary, added = backend.get_vocab(), backend.get_added_tokens_decoder().values()
    shrinking = _shrinking(backend)
    swallows = any(token.lstrip or token.rstrip for token in added)  # the spaces beside it, however many
    if shrinking is None or swallows or not _knows_every_byte(vocabulary, decoder):
        return sys.maxsize
    if decoder is None:
        strange = set().union(*vocabulary) - byte_of_symbol().keys()
        longest = max(
            len(token.encode() if strange & {*token} else token) for token in vocabulary
        )  # else a symbol is a byte
    else:
        longest = max(len(decoder.token_bytes(token)) for token in vocabulary)
    return shrinking * max(longest, *(len(token.content.encode()) for token in added), 1)
