"""The names of tokens in log-probabilities, their `bytes` and their `text_offset`, as vLLM tells them: also where a token holds only a part
of a character. The twins here are slow and obvious: they decode with the tokenizers library, again and again."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, strategies as st
from server_under_test import EOS, InProcessServer, events
from small_tokenizers import byte_level, metaspace, sentencepiece

from stage02_server.features.logprobs.answer import ChatLogprobsWriter
from stage02_server.features.logprobs.token_texts import TokenTexts
from stage03_engine.frontend.tokenizer import Tokenizer, get_tokenizer
from stage03_engine.messages import TokenLogprobs

# Beginnings of characters, their ends, and what can be neither, as often as letters.
PARTS = [0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0xE0, 0xFF, 0x41, 0x20]
Names = list[str]


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.backend.decode(token_ids, skip_special_tokens=False)


def name_of(tokenizer: Tokenizer, before: list[int], token_id: int) -> str:
    """Its own text, unless that ends inside a character; then what it completes with the fewest tokens before it, four at most."""
    if not decoded(tokenizer, [token_id]).endswith("\ufffd"):
        return decoded(tokenizer, [token_id])
    for count in range(1, min(4, len(before)) + 1):
        context = before[-count:]
        whole = decoded(tokenizer, [*context, token_id])
        if not whole.endswith("\ufffd"):
            while context and decoded(tokenizer, context[-1:]).endswith("\ufffd"):
                del context[-1]
            return whole[len(decoded(tokenizer, context)) :]
    return ""


def names_of(tokenizer: Tokenizer, token_ids: list[int]) -> Names:
    return [name_of(tokenizer, token_ids[:place], token_id) for place, token_id in enumerate(token_ids)]


@pytest.fixture(scope="module", params=["gpt2-tiny", "byte level"])
def of_bytes(request: pytest.FixtureRequest) -> Tokenizer:
    return get_tokenizer("gpt2-tiny") if request.param == "gpt2-tiny" else Tokenizer(byte_level(), eos_token_id=None)


@given(data=st.data())
def test_names_and_bytes_of_random_tokens(of_bytes: Tokenizer, data: Any) -> None:
    tokenizer = of_bytes
    parts = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i).endswith("\ufffd")]
    token = st.sampled_from(parts) | st.integers(0, tokenizer.vocab_size - 1)
    drawn: list[list[int]] = data.draw(st.lists(st.lists(token, min_size=1, max_size=4, unique=True), max_size=24))
    positions = [TokenLogprobs(each, [-1.0 - rank for rank in range(len(each))], 1) for each in drawn]
    texts, chat, before = TokenTexts(tokenizer), ChatLogprobsWriter(tokenizer, all_tokens=True), []
    for position, entry in zip(positions, chat.write(positions), strict=True):
        expected = {token_id: name_of(tokenizer, before, token_id) for token_id in position.token_ids}
        assert texts.at(position) == expected
        chosen, *_ = told = list(expected.values())
        assert (entry.token, entry.bytes) == (chosen, list(chosen.encode()))
        assert [(each.token, each.bytes) for each in entry.top_logprobs] == [
            (name, list(name.encode())) for name in told
        ]
        before.append(position.token_ids[0])


@pytest.mark.parametrize("text", ["naïve café – 😀🙂", "漢字かな交じり文", "Ω≈ç√∫˜µ≤"])
def test_the_names_and_bytes_of_a_texts_tokens_add_up_to_it(text: str) -> None:
    tokenizer = get_tokenizer("gpt2-tiny")
    positions = [TokenLogprobs([token_id], [0.0], 1) for token_id in tokenizer.encode(text)]
    assert len(positions) > len(text.encode()) / 2  # most of them are parts of characters
    entries = ChatLogprobsWriter(tokenizer).write(positions)
    assert "".join(entry.token for entry in entries) == text
    assert [byte for entry in entries for byte in entry.bytes] == list(text.encode())
    assert [entry.token for entry in entries] == names_of(tokenizer, tokenizer.encode(text))


@pytest.mark.parametrize("make", [sentencepiece, lambda: sentencepiece(strip=False), metaspace])
@given(data=st.data())
def test_names_of_tokens_that_are_no_bytes(make: Any, data: Any) -> None:
    """A token's own text keeps the space that begins it, which decoding it alone would drop."""
    tokenizer = Tokenizer(make(), eos_token_id=None)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    texts = TokenTexts(tokenizer)
    for token_id in ids:
        (name,) = texts.at(TokenLogprobs([token_id], [0.0], 1)).values()
        own = tokenizer.token_text(token_id)
        assert name == own if not own.endswith("\ufffd") else len(name) <= 1 or name.endswith(own)


bodies = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.sampled_from(PARTS) | st.just(EOS), min_size=1, max_size=20),
        "max_tokens": st.integers(0, 20),
        "ignore_eos": st.just(True),
        "echo": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.just(1),
        "return_token_ids": st.just(True),
    }
)


def ids_of_bytes(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(EOS)}
    return [EOS if byte == EOS else ids[bytes([byte])] for byte in prompt]


def expected_names(tokenizer: Tokenizer, prompt: list[int], answer: list[int], body: dict[str, Any]) -> Names:
    """Those of the prompt, whose first token stands apart, if it is echoed, and those of the answer: three sequences."""
    echoed = prompt if body["echo"] else []
    if body["return_tokens_as_token_ids"]:
        return [f"token_id:{token_id}" for token_id in echoed + answer]
    first = [decoded(tokenizer, echoed[:1])] if echoed else []
    return first + names_of(tokenizer, echoed[1:]) + names_of(tokenizer, answer)


def offsets_after(start: int, names: Names) -> list[int]:
    return [start + sum(map(len, names[:place])) for place in range(len(names))]


@given(body=bodies)
def test_offsets_of_an_answer_count_the_names_before(server: InProcessServer, body: dict[str, Any]) -> None:
    tokenizer = server.engine.tokenizer
    body = body | {"prompt": ids_of_bytes(tokenizer, body["prompt"])}
    body["max_tokens"] = body["max_tokens"] if body["echo"] else max(1, body["max_tokens"])
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    names = expected_names(tokenizer, body["prompt"], choice["token_ids"], body)
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == offsets_after(0, names)


@given(body=bodies)
def test_offsets_of_a_chunk_begin_where_the_text_so_far_ends(server: InProcessServer, body: dict[str, Any]) -> None:
    tokenizer = server.engine.tokenizer
    body = body | {"prompt": ids_of_bytes(tokenizer, body["prompt"]), "stream": True}
    body["max_tokens"] = body["max_tokens"] if body["echo"] else max(1, body["max_tokens"])
    choices = [chunk["choices"][0] for chunk in events(server.post("/v1/completions", body).text)]
    ends = [0, *accumulate(len(choice["text"]) for choice in choices)]
    told = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    answer = [token_id for choice in choices for token_id in choice["token_ids"]]
    assert told == expected_names(tokenizer, body["prompt"], answer, body)
    for start, choice in zip(ends, choices):
        assert choice["logprobs"]["text_offset"] == offsets_after(start, choice["logprobs"]["tokens"])
