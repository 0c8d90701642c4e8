"""Vectors over HTTP: /v1/embeddings, /pooling, /score and /rerank on the echo engine, whose vectors count tokens."""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from openai import NotFoundError, OpenAI
from server_under_test import MAX_MODEL_LEN, InProcessServer, ServerProcess, byte_config

from stage02_server.features.pooling import serving as serving_pooling
from stage03_engine.core.features.pooling.manifest import PoolingConfig
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.llm import LLM

CUTTABLE = PoolingConfig(runner_type="pooling", is_matryoshka=True)
SIZE = 8  # hidden size of the byte model
TOKENIZER = init_tokenizer_from_configs(byte_config())  # one token per byte
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


def counts(text: str, normalize: bool = True, size: int = SIZE) -> list[float]:
    """What the echo says of a text, by its definition."""
    vector = [float(sum(token % SIZE == d for token in TOKENIZER.encode(text))) for d in range(size)]
    length = math.hypot(*vector) or 1.0
    return [x / length for x in vector] if normalize else vector


def decoded(text: str) -> list[float]:
    return array("f", base64.b64decode(text)).tolist()


@pytest.fixture(scope="module")
def pooling() -> Iterator[InProcessServer]:
    server = InProcessServer(config=replace(byte_config(), pooling_config=CUTTABLE))
    yield server
    server.close()


def refused(server: InProcessServer, path: str, body: dict[str, Any], status: int, param: str | None) -> str:
    headers = {"Content-Type": "application/json"}
    # httpx cannot send half a character
    answer = server.request("POST", path, content=json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param), error
    return error["message"]


@given(texts=st.lists(TEXTS, min_size=1, max_size=5), normalize=st.booleans(), data=st.data())
def test_every_form_of_input_gives_the_same_vectors(
    pooling: InProcessServer, texts: list[str], normalize: bool, data: st.DataObject
) -> None:
    size = data.draw(st.sampled_from([None, 1, 5, SIZE]))
    body: dict[str, Any] = {
        "input": texts,
        "dimensions": size,
        data.draw(st.sampled_from(["normalize", "use_activation"])): normalize,
    }
    answer = pooling.post("/v1/embeddings", body).json()
    wanted = [counts(text, normalize, size or SIZE) for text in texts]
    for entry, vector in zip(answer["data"], wanted, strict=True):
        assert entry["embedding"] == pytest.approx(vector, abs=1e-6) and entry["object"] == "embedding"
    assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
    num_tokens = sum(len(text.encode()) for text in texts)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert answer["id"].startswith("embd-") and answer["object"] == "list" and answer["model"] == "byte-model"
    ids = [TOKENIZER.encode(text) for text in texts]
    for other in (ids, ids[0], texts[0]):
        again = pooling.post("/v1/embeddings", body | {"input": other, "encoding_format": "base64"}).json()["data"]
        assert [decoded(entry["embedding"]) for entry in again] == [
            e["embedding"] for e in answer["data"][: len(again)]
        ]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<{{ who }}>{% endif %}"
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": st.text("aé!", max_size=4)}),
    min_size=1, max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def templated() -> Iterator[InProcessServer]:
    config = replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling"))
    server = InProcessServer(config=config, chat_template=TEMPLATE, default_chat_template_kwargs={"who": "me"})
    yield server
    server.close()


@given(messages=MESSAGES, more=st.fixed_dictionaries({}, optional={
    "add_generation_prompt": st.booleans(), "chat_template_kwargs": st.just({"who": "you"}), "add_special_tokens": st.booleans(),
}))  # fmt: skip
def test_a_chat_is_the_text_that_the_template_makes_of_it(
    templated: InProcessServer, messages: list[dict[str, str]], more: dict[str, Any]
) -> None:
    """The vector is that of the tokens of /tokenize, where an answer would begin unless told otherwise."""
    chat = {"messages": messages} | more
    tokens = templated.post("/tokenize", {"add_generation_prompt": False} | chat).json()["tokens"]
    who = (more.get("chat_template_kwargs") or {"who": "me"})["who"] if more.get("add_generation_prompt") else None
    written = "".join(f"<{m['role']}>{m['content']}" for m in messages) + (f"<{who}>" if who else "")
    assert tokens == TOKENIZER.encode(written)
    for path in ("/v1/embeddings", "/pooling"):
        asked, text = templated.post(path, chat).json(), templated.post(path, {"input": tokens}).json()
        assert asked["data"] == text["data"] and asked["usage"] == text["usage"]


def test_a_chat_of_a_model_without_a_template_is_concatenated(pooling: InProcessServer) -> None:
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    (entry,) = pooling.post("/v1/embeddings", {"messages": messages, "normalize": False}).json()["data"]
    assert entry["embedding"] == counts("abc", normalize=False)


def test_pooling_gives_a_vector_per_token_unless_asked_for_one(pooling: InProcessServer) -> None:
    each = [counts(letter) for letter in "abc"]
    (entry,) = pooling.post("/pooling", {"input": "abc"}).json()["data"]
    assert entry == {"index": 0, "object": "pooling", "data": each}
    (entry,) = pooling.post("/pooling", {"input": "abc", "encoding_format": "base64"}).json()["data"]
    assert decoded(entry["data"]) == [number for vector in each for number in vector]
    (entry,) = pooling.post("/pooling", {"input": "abc", "task": "embed"}).json()["data"]
    assert entry["data"] == pytest.approx(counts("abc"), abs=1e-6)


def cosine(one: str, other: str) -> float:
    return sum(a * b for a, b in zip(counts(one), counts(other)))


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(pooling: InProcessServer, names: tuple[str, str], path: str) -> None:
    for left, right, pairs in (
        ("to be", "or not", [("to be", "or not")]),
        ("to be", ["to be", "x"], [("to be", "to be"), ("to be", "x")]),
        (["to be", "x"], ["abc", "xx"], [("to be", "abc"), ("x", "xx")]),
    ):
        answer = pooling.post(path, {names[0]: left, names[1]: right}).json()
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(
            [cosine(*pair) for pair in pairs], abs=1e-6
        )
        assert answer["id"].startswith("score-") and answer["data"][0]["object"] == "score"


@given(query=TEXTS, documents=st.lists(TEXTS, min_size=1, max_size=6), top_n=st.integers(0, 8))
def test_rerank_sorts_by_the_score(pooling: InProcessServer, query: str, documents: list[str], top_n: int) -> None:
    answer = pooling.post("/v1/rerank", {"query": query, "documents": documents, "top_n": top_n}).json()
    scores = pooling.post("/score", {"text_1": query, "text_2": documents}).json()["data"]
    order = sorted(range(len(documents)), key=lambda index: -scores[index]["score"])[: top_n or None]
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result["document"]["text"] == documents[result["index"]]
        assert result["relevance_score"] == scores[result["index"]]["score"]
    assert answer["usage"]["total_tokens"] == len((query + "".join(documents)).encode())


def test_a_text_of_the_whole_context_fits_and_longer_ones_are_cut_on_request(pooling: InProcessServer) -> None:
    long = "a" * MAX_MODEL_LEN
    assert pooling.post("/v1/embeddings", {"input": long}).status_code == 200
    assert "shorten it" in refused(pooling, "/v1/embeddings", {"input": ["a", long + "b"]}, 400, "input")
    body = {"input": long + "b", "normalize": False, "truncate_prompt_tokens": -1}
    (entry,) = pooling.post("/v1/embeddings", body).json()["data"]
    assert entry["embedding"] == counts("a" * (MAX_MODEL_LEN - 1) + "b", normalize=False)
    (entry,) = pooling.post("/v1/embeddings", body | {"truncate_prompt_tokens": 2}).json()["data"]
    assert entry["embedding"] == counts("ab", normalize=False)
    (entry,) = pooling.post("/v1/embeddings", body | {"truncate_prompt_tokens": 2, "truncation_side": "right"}).json()[
        "data"
    ]
    assert entry["embedding"] == counts("aa", normalize=False)


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
    ("/v1/embeddings", {"messages": []}, "messages"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": ""}]}, "messages"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a" * (MAX_MODEL_LEN + 1)}]}, "messages"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("/v1/embeddings", {"messages": [{"content": "a"}]}, "body.messages"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input"),
    ("/v1/embeddings", {"input": [257]}, "input"),
    ("/v1/embeddings", {"input": [-1]}, "body.input"),
    ("/v1/embeddings", {"input": [1.5]}, "body.input"),
    ("/v1/embeddings", {"input": "\ud800"}, "body.input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": SIZE + 1}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**30}, "body.dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1.5}, "body.dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "body.encoding_format"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "body.cache_salt"),
    ("/pooling", {"input": "a", "task": "plugin"}, "body.task"),
    ("/score", {}, "text_1"),
    ("/score", {"text_1": "a"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": "b", "queries": "a", "documents": "b"}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_1"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), IMPOSSIBLE)
def test_refusals_name_the_field(pooling: InProcessServer, path: str, body: dict[str, Any], param: str) -> None:
    text = refused(pooling, path, body, 400, param)
    assert not text.startswith("prompt "), text
    assert not pooling.engine.num_unfinished_requests
    assert pooling.post("/v1/embeddings", {"input": "still fine"}).status_code == 200


def test_each_server_has_its_own_tasks(server: InProcessServer, pooling: InProcessServer) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        assert "no generate task" in refused(pooling, path, body, 404, "model")
    score = {"text_1": "a", "text_2": "b"}
    rerank = {"query": "a", "documents": ["b"]}
    for path, body in (
        ("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a"}), ("/score", score), ("/rerank", rerank),
    ):  # fmt: skip
        assert "--runner pooling" in refused(server, path, body, 404, "model")


@pytest.mark.parametrize(
    ("pooling_config", "fine", "wrong", "said"),
    [
        (
            PoolingConfig(runner_type="pooling"),
            None,
            SIZE,
            'Model "byte-model" does not support matryoshka representation',
        ),
        (replace(CUTTABLE, matryoshka_dimensions=(2, 4)), 4, 3, "must be one of 2, 4, got 3"),
        (CUTTABLE, SIZE, SIZE + 1, f"in [1, {SIZE}]"),
        (replace(CUTTABLE, matryoshka_dimensions=(2, SIZE + 1)), 2, SIZE + 1, f"in [1, {SIZE}]"),
    ],
)
def test_only_a_model_that_was_trained_for_it_has_shorter_vectors(
    make_server: Callable[..., InProcessServer], pooling_config: PoolingConfig, fine: int | None, wrong: int, said: str
) -> None:
    server = make_server(config=replace(byte_config(), pooling_config=pooling_config))
    (entry,) = server.post("/v1/embeddings", {"input": "abc", "dimensions": fine, "normalize": False}).json()["data"]
    assert entry["embedding"] == counts("abc", normalize=False, size=fine or SIZE)
    for path in ("/v1/embeddings", "/pooling"):
        assert said in refused(server, path, {"input": "abc", "dimensions": wrong}, 400, "dimensions")


def test_prompts_count_in_the_metrics(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server(config=replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling")))
    server.post("/v1/embeddings", {"input": ["abc", "de"]})
    lines = server.request("GET", "/metrics").text.splitlines()
    (count,) = [line.split()[-1] for line in lines if line.startswith("vllm:prompt_tokens_total")]
    assert float(count) == 5


def test_the_real_engine_behind_openais_client(start_server: Callable[..., ServerProcess]) -> None:
    flags = [
        "--runner",
        "pooling",
        "--pooler-config",
        '{"pooling_type": "MEAN"}',
        "--kv-cache-memory-bytes",
        "50000000",
    ]
    server = start_server("gpt2-tiny", "--port", "0", *flags)
    client = OpenAI(base_url=server.wait_until_ready() + "/v1", api_key="none")
    texts = ["To be, or not to be", "K", "Speak, speak. " * 20]
    together = client.embeddings.create(model="gpt2-tiny", input=texts)
    with LLM("gpt2-tiny", convert="embed", pooler_config={"pooling_type": "MEAN"}, kv_cache_memory_bytes=10**7) as llm:
        wanted = [array("f", output.result["pooled"][0]).tolist() for output in llm.encode(texts) if output.result]
    for entry, vector in zip(together.data, wanted, strict=True):
        assert entry.embedding == pytest.approx(vector, abs=1e-5)
    with pytest.raises(NotFoundError, match="no generate task"):
        client.completions.create(model="gpt2-tiny", prompt="a")


def test_a_vector_for_each_of_too_many_tokens_is_refused(
    pooling: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_pooling, "MAX_NUMBERS", 10 * SIZE)
    assert pooling.post("/pooling", {"input": ["abcde", "fghij"]}).status_code == 200
    assert pooling.post("/pooling", {"input": ["abcde", "fghijk"], "task": "embed"}).status_code == 200
    assert pooling.post("/pooling", {"input": ["abcde", "fghijk"], "dimensions": 7}).status_code == 200
    refused(pooling, "/pooling", {"input": ["abcde", "fghijk"]}, 400, "input")
