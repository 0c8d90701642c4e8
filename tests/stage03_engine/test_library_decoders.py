"""WordPiece and the other vocabularies that the tokenizers library reads, trained here on a few sentences: what is streamed, token by token, is
what the library makes of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from server_under_test import ServerProcess, events
from small_tokenizers import TEXTS, end_of_word, model_folder, sentencepiece, unigram, wordpiece
from tokenizers import Tokenizer as Backend, decoders

from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.sampling_params import SamplingParams


def fused_bytes() -> Backend:
    """Steps in an order that SentencePiece's own room does not know."""
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])
    return backend


BACKENDS: dict[str, Backend] = {
    "WordPiece": wordpiece(), "WordPiece as it is": wordpiece(cleanup=False), "end of word": end_of_word(), "unigram": unigram(),
    "unigram with Metaspace": unigram(decoders.Metaspace()), "bytes": fused_bytes(),
}  # fmt: skip
KINDS = {name: Tokenizer(backend, None) for name, backend in BACKENDS.items()}
texts = st.sampled_from(TEXTS) | st.lists(
    st.sampled_from(["to", " ", "be,", "n't", "’", "é", "😀", " do ", "?", "[SEP]"])
).map("".join)


def pieces(kind: str, ids: list[int], prompt: list[int], **params: Any) -> list[str]:
    """What each token adds."""
    detokenizer, found = IncrementalDetokenizer(KINDS[kind], SamplingParams(**params), prompt), []
    for token_id in ids:
        detokenizer.update([token_id])
        found.append(detokenizer.next_text(delta=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, skip=st.booleans())
def test_a_text_is_encoded_decoded_and_streamed_as_the_library_does_it(kind: str, text: str, skip: bool) -> None:
    ids = KINDS[kind].encode(text)
    assert ids == BACKENDS[kind].encode(text).ids
    expected = BACKENDS[kind].decode(ids, skip_special_tokens=skip)
    assert KINDS[kind].decode(ids, skip) == expected
    assert "".join(pieces(kind, ids, [], skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_after_any_prompt(kind: str, data: Any, skip: bool) -> None:
    """The slow twin decodes all there is, for each token."""
    backend = BACKENDS[kind]
    some = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=12)
    prompt, ids = data.draw(some), data.draw(some)
    texts = [backend.decode(prompt + ids[:count], skip_special_tokens=skip) for count in range(len(ids) + 1)]
    expected = [after.removeprefix(before) for before, after in pairwise(texts)]
    assert pieces(kind, ids, prompt, skip_special_tokens=skip) == expected


def test_bytes_wait_for_their_character_but_not_for_ever() -> None:
    backend = BACKENDS["bytes"]
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "é😀".encode()]
    assert pieces("bytes", ids, []) == ["", "é", "", "", "", "😀"]
    wrong = pieces("bytes", [ids[0]] * 100, [])
    assert "".join(wrong).strip("\ufffd") == "" and sum(map(len, wrong)) > 80
    last = backend.token_to_id("▁to")
    assert pieces("bytes", [ids[0], last], [])[1] == "\ufffd to"


def test_stop_strings_and_names() -> None:
    tokenizer = KINDS["WordPiece"]
    ids = tokenizer.encode("to be, or not to be")
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["or no"]))
    assert detokenizer.update(ids) == "or no" and detokenizer.text == "to be, "
    assert "".join(map(tokenizer.token_text, ids)) == " to be, or not to be"
    assert tokenizer.token_bytes(100_000) == b"" and tokenizer.token_text(1) == " [CLS]"


@pytest.fixture(scope="module", params=["WordPiece", "end of word", "unigram"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind = request.param
    folder = tmp_path_factory.mktemp("model")
    model_folder(folder, BACKENDS[kind], {}, vocab_size=BACKENDS[kind].get_vocab_size())
    server = ServerProcess(str(folder), "--port", "0", "--load-format", "dummy", "--num-gpu-blocks-override", "20")
    server.wait_until_ready()
    yield kind, httpx.Client(base_url=server.url, timeout=60)
    server.close()


def test_a_server_streams_stops_and_tells_log_probabilities(served: tuple[str, httpx.Client]) -> None:
    kind, client = served
    body = {
        "prompt": "to be", "max_tokens": 24, "temperature": 2.0, "seed": 5, "ignore_eos": True, "logprobs": 2, "return_token_ids": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    backend, prompt, ids = BACKENDS[kind], choice["prompt_token_ids"], choice["token_ids"]
    assert len(ids) == 24 and prompt == backend.encode("to be").ids
    before, whole = (backend.decode(each, skip_special_tokens=False) for each in (prompt, prompt + ids))
    assert before + choice["text"] == whole
    chunks = events(client.post("/v1/completions", json=body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    names = choice["logprobs"]["tokens"]
    assert names == [KINDS[kind].token_text(token_id) for token_id in ids]
    assert choice["logprobs"]["text_offset"] == [sum(map(len, names[:place])) for place in range(len(names))]
    stop = choice["text"].split()[3]
    stopped = client.post("/v1/completions", json=body | {"stop": stop}).json()["choices"][0]
    assert stopped["text"] == choice["text"][: choice["text"].index(stop)] and stopped["stop_reason"] == stop
    if kind == "WordPiece":  # the others have words that not every way to begin them can end
        structured = client.post("/v1/completions", json=body | {"guided_regex": "( to| be)+"}).json()
        assert set(structured["choices"][0]["text"].split()) <= {"to", "be", "t", "b"}, (
            structured
        )  # cut off where it was
