"""Where each token of an answer begins in its text, also when its bytes are no characters: `text_offset` of completions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from server_under_test import EOS, MAX_MODEL_LEN, InProcessServer
from small_tokenizers import byte_level, metaspace, sentencepiece

from stage02_server.features.logprobs.token_texts import TokenOffsets
from stage03_engine.frontend.tokenizer import Tokenizer

quick = settings(max_examples=150, deadline=None)
# Beginnings of characters, their ends, and what can be neither, as often as letters.
PARTS = [0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0xE0, 0xFF, 0x41, 0x20]


def ends(raw: bytes) -> list[int]:
    """After which byte each character of `raw.decode(errors="replace")` ends."""
    found, position = [], 0
    while position < len(raw):
        try:
            size = len(raw[position:].decode()[0].encode())
        except UnicodeDecodeError as error:
            valid = raw[position : position + error.start].decode()
            size = len(valid[0].encode()) if valid else error.end
        position += size
        found.append(position)
    assert len(found) == len(raw.decode(errors="replace"))
    return found


def expected_offsets(pieces: list[bytes]) -> list[int]:
    """Of tokens with these bytes: so many characters have ended before each."""
    before, found = ends(b"".join(pieces)), []
    begin = 0
    for piece in pieces:
        found.append(sum(end <= begin for end in before))
        begin += len(piece)
    return found


@quick
@given(raw=st.lists(st.sampled_from(PARTS), min_size=1, max_size=20), count=st.integers(1, 20), echo=st.booleans())
def test_of_bytes_that_are_no_characters(server: InProcessServer, raw: list[int], count: int, echo: bool) -> None:
    tokenizer = server.engine.tokenizer
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(EOS)}
    body = {"prompt": [ids[bytes([byte])] for byte in raw], "max_tokens": count, "logprobs": 1, "echo": echo}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    answer = (bytes(raw) * count)[: min(count, MAX_MODEL_LEN - len(raw))]
    offsets = expected_offsets([bytes([byte]) for byte in answer])
    if echo:  # the prompt and the answer are two texts, one after the other
        prompt = bytes(raw).decode(errors="replace")
        assert choice["text"].startswith(prompt)
        offsets = expected_offsets([bytes([byte]) for byte in raw]) + [len(prompt) + offset for offset in offsets]
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.fixture(scope="module", params=[byte_level, sentencepiece, lambda: sentencepiece(strip=False), metaspace])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(request.param(), eos_token_id=None)


@quick
@given(data=st.data())
def test_of_tokens_of_any_vocabulary(tokenizer: Tokenizer, data: Any) -> None:
    some = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
    after, ids, skip = data.draw(some), data.draw(some), data.draw(st.booleans())
    offsets, stream, text = TokenOffsets(tokenizer, after, skip), tokenizer.stream(after, skip), ""
    found = []
    for token_id in ids:
        found.append(offsets.next(token_id))
        if not (skip and tokenizer.is_special(token_id)):
            text += stream.push(tokenizer.token(token_id), tokenizer.token_bytes(token_id))
    assert found == sorted(found) and all(0 <= offset <= len(text) for offset in found)
    for offset, token_id in zip(found, ids, strict=True):
        own, is_byte = tokenizer.token_text(token_id), tokenizer.token(token_id).startswith("<0x")
        if not (is_byte or "\ufffd" in own or (skip and tokenizer.is_special(token_id))):
            # the first space of a text may be left out
            assert text.startswith(own, offset) or (offset == 0 and text.startswith(own.replace(" ", "")))
