"""/classify, and /score and /rerank by a cross-encoder, over HTTP: on the echo engine, and on real models beside transformers."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from server_under_test import MAX_MODEL_LEN, InProcessServer, byte_config
from small_classifiers import classifier
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stage02_server.features.pooling import serving as serving_pooling
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.pooling.manifest import PoolingConfig
from stage03_engine.frontend.features.in_process.async_inproc_client import AsyncInprocClient

TEXTS = ["To be, or not to be", "the slings and arrows of outrageous fortune", "To die, to sleep", "x"]


def echo_config(*labels: str) -> VllmConfig:
    config = byte_config()
    shape = replace(config.shape, architecture="GPT2ForSequenceClassification", labels=labels)
    pooling = PoolingConfig(runner_type="pooling", convert_type="classify")
    return replace(config, model_config=replace(config.model_config, shape=shape), pooling_config=pooling)


@pytest.fixture(scope="module")
def three() -> Iterator[InProcessServer]:
    server = InProcessServer(config=echo_config("good", "bad", "ugly"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def one() -> Iterator[InProcessServer]:
    server = InProcessServer(config=echo_config("relevance"))
    yield server
    server.close()


class Real:
    """A small model behind the server, with the engine in this process, and the same model in transformers."""

    def __init__(self, folder: Path, family: str, **settings_of_model: Any) -> None:
        self.model: PreTrainedModel = classifier(folder, family, **settings_of_model)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        config = EngineArgs.from_kwargs(
            model=str(folder), kv_cache_memory_bytes=10**7, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
        )
        self.server = InProcessServer(AsyncInprocClient(config, make_core), config=config)  # type: ignore[arg-type]

    @torch.inference_mode()
    def logits(self, *texts: str, **how: Any) -> list[float]:
        ids = self.tokenizer(*texts, return_tensors="pt", **how)["input_ids"]
        return self.model(ids).logits[0].tolist()


@pytest.fixture(scope="module")
def emotions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    labels = {0: "joy", 1: "anger", 2: "sorrow"}
    real = Real(tmp_path_factory.mktemp("emotions"), "llama", id2label=labels, num_labels=3)
    yield real
    real.server.close()


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def cross_encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    real = Real(tmp_path_factory.mktemp("scores"), request.param, num_labels=1)
    yield real
    real.server.close()


def refused(server: InProcessServer, path: str, body: dict[str, Any], status: int, param: str | None) -> str:
    headers = {"Content-Type": "application/json"}
    answer = server.request("POST", path, content=json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param), error
    return error["message"]


def test_classes_are_those_of_transformers(emotions: Real) -> None:
    answer = emotions.server.post("/classify", {"input": TEXTS}).json()
    raw = emotions.server.post("/classify", {"input": TEXTS, "use_activation": False}).json()["data"]
    for entry, plain, text in zip(answer["data"], raw, TEXTS, strict=True):
        logits = torch.tensor(emotions.logits(text))
        assert entry["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5) and entry["num_classes"] == 3
        assert plain["probs"] == pytest.approx(logits.tolist(), abs=1e-4)
        assert entry["label"] == plain["label"] == emotions.model.config.id2label[int(logits.argmax())]
    assert len({entry["label"] for entry in answer["data"]}) > 1, "one label for everything shows nothing"
    assert answer["id"].startswith("classify-") and answer["object"] == "list"
    num_tokens = sum(len(ids) for ids in emotions.tokenizer(TEXTS)["input_ids"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]


def test_special_tokens_can_be_left_out(emotions: Real) -> None:
    (entry,) = emotions.server.post(
        "/classify", {"input": TEXTS[0], "add_special_tokens": False, "use_activation": False}
    ).json()["data"]
    wanted = emotions.logits(TEXTS[0], add_special_tokens=False)
    assert entry["probs"] == pytest.approx(wanted, abs=1e-4)


def test_pooling_gives_classes_for_each_token_unless_asked_for_one(emotions: Real) -> None:
    ids = emotions.tokenizer(TEXTS[2])["input_ids"]
    (each,) = emotions.server.post("/pooling", {"input": TEXTS[2], "use_activation": False}).json()["data"]
    for end, logits in enumerate(each["data"], start=1):
        wanted = emotions.model(torch.tensor([ids[:end]])).logits[0].tolist()
        assert logits == pytest.approx(wanted, abs=1e-4)
    body = {"input": TEXTS[2], "task": "classify", "use_activation": False}
    (whole,) = emotions.server.post("/pooling", body).json()["data"]
    assert whole["data"] == pytest.approx(each["data"][-1], abs=1e-5)
    (packed,) = emotions.server.post("/pooling", body | {"encoding_format": "base64"}).json()["data"]
    assert array("f", base64.b64decode(packed["data"])).tolist() == pytest.approx(whole["data"], abs=1e-6)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_cross_encoder_reads_both_texts_as_one(cross_encoder: Real, path: str) -> None:
    for left, right, pairs in (
        (TEXTS[0], TEXTS[1], [(0, 1)]),
        (TEXTS[0], TEXTS[1:], [(0, 1), (0, 2), (0, 3)]),
        (TEXTS[:3], TEXTS[1:], [(0, 1), (1, 2), (2, 3)]),
    ):
        answer = cross_encoder.server.post(path, {"text_1": left, "text_2": right}).json()
        raw = cross_encoder.server.post(path, {"queries": left, "documents": right, "use_activation": False}).json()
        logits = [cross_encoder.logits(TEXTS[one], TEXTS[other])[0] for one, other in pairs]
        assert [entry["score"] for entry in raw["data"]] == pytest.approx(logits, abs=1e-4)
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(
            torch.tensor(logits).sigmoid().tolist(), abs=1e-5
        )
        ids = [cross_encoder.tokenizer(TEXTS[one], TEXTS[other])["input_ids"] for one, other in pairs]
        assert answer["usage"]["total_tokens"] == sum(len(each) for each in ids)


def test_rerank_sorts_by_the_score(cross_encoder: Real) -> None:
    answer = cross_encoder.server.post("/v2/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 3}).json()
    scores = [torch.tensor(cross_encoder.logits(TEXTS[0], text)).sigmoid().item() for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda index: -scores[index])[:3]
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    assert [result["document"]["text"] for result in answer["results"]] == [TEXTS[index] for index in order]


def test_a_long_pair_is_cut_at_the_end_of_the_longer_text(cross_encoder: Real) -> None:
    long = " ".join(TEXTS * 3)
    refused(cross_encoder.server, "/score", {"text_1": "x", "text_2": long}, 400, "text_2")
    body = {"text_1": TEXTS[0], "text_2": long, "use_activation": False}
    for keep, length in ((-1, 64), (12, 12)):
        answer = cross_encoder.server.post("/score", body | {"truncate_prompt_tokens": keep}).json()
        wanted = cross_encoder.logits(TEXTS[0], long, truncation="longest_first", max_length=length)
        assert answer["data"][0]["score"] == pytest.approx(wanted[0], abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == length
    refused(cross_encoder.server, "/score", body | {"truncate_prompt_tokens": 2}, 400, "truncate_prompt_tokens")


def test_a_template_of_the_server_joins_pairs_instead(make_server: Callable[..., InProcessServer]) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.content == '!' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    server = make_server(config=echo_config("relevance"), chat_template=template)
    answer = server.post("/score", {"text_1": "a", "text_2": ["b", "cd"]}).json()
    lengths = [len("<query>a<document>b"), len("<query>a<document>cd")]
    assert answer["usage"]["prompt_tokens"] == sum(lengths), "one token per byte"
    refused(server, "/rerank", {"query": "a", "documents": ["b", "!"]}, 400, "documents")
    assert "At most" in refused(server, "/rerank", {"query": "a", "documents": ["!"] * 2049}, 400, "documents")


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=5))
def test_every_form_of_input_gives_the_same_classes(three: InProcessServer, texts: list[str]) -> None:
    answer = three.post("/classify", {"input": texts}).json()["data"]
    ids = [three.engine.tokenizer.encode(text) for text in texts]
    assert three.post("/classify", {"input": ids}).json()["data"] == answer
    assert three.post("/classify", {"input": texts[0]}).json()["data"] == answer[:1]
    chat = {"messages": [{"role": "user", "content": texts[0]}]}
    assert three.post("/classify", chat).json()["data"] == answer[:1]
    for entry in answer:
        assert entry["label"] == ("good", "bad", "ugly")[entry["probs"].index(max(entry["probs"]))]


IMPOSSIBLE: list[tuple[str, dict[str, Any], str]] = [
    ("/classify", {}, "input"),
    ("/classify", {"input": ""}, "input"),
    ("/classify", {"input": []}, "input"),
    ("/classify", {"input": ["a", ""]}, "input"),
    ("/classify", {"input": [-1]}, "body.input"),
    ("/classify", {"input": "\ud800"}, "body.input"),
    ("/classify", {"input": ["a"] * 2049}, "input"),
    ("/classify", {"input": "a" * (MAX_MODEL_LEN + 1)}, "input"),
    ("/classify", {"input": "a", "use_activation": float("nan")}, "body.use_activation"),
    ("/classify", {"input": "a", "activation": False}, "activation"),
    ("/classify", {"input": "a", "softmax": False}, "softmax"),
    ("/classify", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
    ("/classify", {"messages": [{"role": "user", "content": "\ud800"}]}, "body.messages"),
    ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
    ("/pooling", {"input": "a", "task": "score"}, "body.task"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), IMPOSSIBLE)
def test_refusals_name_the_field(three: InProcessServer, path: str, body: dict[str, Any], param: str) -> None:
    refused(three, path, body, 400, param)
    assert not three.engine.num_unfinished_requests
    assert three.post("/classify", {"input": "still fine"}).status_code == 200


def test_a_cross_encoder_refuses_empty_texts(one: InProcessServer) -> None:
    refused(one, "/score", {"text_1": ["a", ""], "text_2": ["b", "c"]}, 400, "text_1")
    refused(one, "/rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents")
    refused(one, "/rerank", {"query": "", "documents": ["b"]}, 400, "query")
    assert one.post("/rerank", {"query": "a", "documents": ["b"]}).status_code == 200


def test_each_server_has_its_own_tasks(
    server: InProcessServer, three: InProcessServer, one: InProcessServer, make_server: Callable[..., InProcessServer]
) -> None:
    vectors = make_server(config=replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling")))
    bodies: dict[str, dict[str, Any]] = {
        "/classify": {"input": "a"}, "/v1/embeddings": {"input": "a"}, "/pooling": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"}, "/rerank": {"query": "a", "documents": ["b"]},
        "/v1/completions": {"prompt": "a"},
    }  # fmt: skip
    for asked, has in (
        (server, {"/v1/completions"}),
        (vectors, {"/v1/embeddings", "/pooling", "/score", "/rerank"}),
        (three, {"/classify", "/pooling"}),
        (one, {"/classify", "/pooling", "/score", "/rerank"}),
    ):
        for path, body in bodies.items():
            if path in has:
                assert asked.post(path, body).status_code == 200
            else:
                assert "task" in refused(asked, path, body, 404, "model")
    assert "classification head" in refused(server, "/classify", {"input": "a"}, 404, "model")
    for task in ("embed", "token_embed"):
        refused(three, "/pooling", {"input": "a", "task": task}, 404, "model")
    refused(vectors, "/pooling", {"input": "a", "task": "classify"}, 404, "model")
    cosines = {"text_1": "a", "text_2": "b", "use_activation": False}
    refused(vectors, "/score", cosines, 400, "use_activation")


def test_classes_for_each_of_too_many_tokens_are_refused(
    three: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_pooling, "MAX_NUMBERS", 10 * 3)
    assert three.post("/pooling", {"input": ["abcde", "fghij"]}).status_code == 200
    refused(three, "/pooling", {"input": ["abcde", "fghijk"]}, 400, "input")
    assert three.post("/classify", {"input": ["abcde", "fghijk"]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/classify", {"input": "abc"}, "'ab'"),
        ("/pooling", {"input": [97, 98]}, "None, prompt_token_ids: [97, 98]"),
        ("/score", {"text_1": "abc", "text_2": "de"}, "'ab'"),
    ],
)
def test_prompts_are_logged(
    make_server: Any, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], shown: str
) -> None:
    """--enable-log-requests: a line per prompt, whatever is asked of it."""
    server = make_server(config=echo_config("relevance"), enable_log_requests=True, max_log_len=2)
    with caplog.at_level("INFO"):
        assert server.post(path, body).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if "Received request" in record.getMessage()]
    assert f"prompt: {shown}" in line and "PoolingParams" in line and "SamplingParams" not in line
