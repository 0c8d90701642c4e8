"""What each request is answered with: one row a behaviour."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_under_test import EOS, MAX_MODEL_LEN, InProcessServer, byte_config

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BAD_FORM, BAD_REQUEST = "Bad Request", "BadRequestError"

REFUSED_COMPLETIONS: list[tuple[dict[str, Any], int, str, str | None]] = [
    # body (beside the prompt), status, type, param
    ({"model": "unknown"}, 404, "NotFoundError", "model"),
    ({"prompt": ""}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": []}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": [[]]}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": ["a", ""]}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": None}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": 5}, 400, BAD_FORM, "body.prompt"),
    ({"prompt": [1, "a"]}, 400, BAD_FORM, "body.prompt"),
    ({"prompt": [True]}, 400, BAD_FORM, "body.prompt"),
    ({"prompt": [-1]}, 400, BAD_FORM, "body.prompt"),
    ({"prompt": [EOS + 1]}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": [10**40]}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": "x" * MAX_MODEL_LEN}, 400, BAD_REQUEST, "prompt"),
    ({"prompt": "word " * 1_000_000}, 400, BAD_REQUEST, "prompt"),
    ({"max_tokens": 0}, 400, BAD_REQUEST, "max_tokens"),
    ({"max_tokens": -1}, 400, BAD_REQUEST, "max_tokens"),
    ({"max_tokens": MAX_MODEL_LEN + 1}, 400, BAD_REQUEST, "max_tokens"),
    ({"max_tokens": 10**40}, 400, BAD_FORM, "body.max_tokens"),
    ({"max_tokens": 1.5}, 400, BAD_FORM, "body.max_tokens"),
    ({"max_tokens": "many"}, 400, BAD_FORM, "body.max_tokens"),
    ({"temperature": -0.1}, 400, BAD_REQUEST, "temperature"),
    ({"temperature": 2.1}, 400, BAD_REQUEST, "temperature"),
    ({"temperature": "warm"}, 400, BAD_FORM, "body.temperature"),
    ({"top_p": 0}, 400, BAD_REQUEST, "top_p"),
    ({"top_p": 1.01}, 400, BAD_REQUEST, "top_p"),
    ({"top_k": -2}, 400, BAD_REQUEST, "top_k"),
    ({"top_k": 2**31}, 400, BAD_FORM, "body.top_k"),
    ({"min_p": 1.5}, 400, BAD_REQUEST, "min_p"),
    ({"seed": 2**63}, 400, BAD_FORM, "body.seed"),
    ({"logprobs": 21}, 400, BAD_REQUEST, "logprobs"),
    ({"logprobs": -1}, 400, BAD_REQUEST, "logprobs"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, BAD_FORM, "body.stop"),
    ({"stop": ""}, 400, BAD_REQUEST, "stop"),
    ({"stop": 3}, 400, BAD_FORM, "body.stop"),
    ({"stop_token_ids": ["a"]}, 400, BAD_FORM, "body.stop_token_ids"),
    ({"n": 0}, 400, BAD_REQUEST, "n"),
    ({"n": 129}, 400, BAD_REQUEST, "n"),
    ({"n": 2, "temperature": 0}, 400, BAD_REQUEST, "n"),
    ({"n": 2, "seed": 2**63 - 1}, 400, BAD_REQUEST, "seed"),
    ({"stream": True, "stream_options": 1}, 400, BAD_FORM, "body.stream_options"),
    ({"echo": "yes please"}, 400, BAD_FORM, "body.echo"),
    ({"suffix": "end"}, 400, BAD_REQUEST, "suffix"),
]

REFUSED_CHATS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "unknown"}, 404, "NotFoundError", "model"),
    ({"messages": []}, 400, BAD_REQUEST, "messages"),
    ({"messages": "Hello"}, 400, BAD_FORM, "body.messages"),
    ({"messages": [{"content": "Hello"}]}, 400, BAD_FORM, "body.messages"),
    ({"messages": [{"role": "user", "content": 1}]}, 400, BAD_FORM, "body.messages"),
    ({"messages": [{"role": "user", "content": ""}]}, 400, BAD_REQUEST, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        BAD_FORM,
        "body.messages",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, BAD_REQUEST, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, BAD_FORM, "body.messages"),
    ({"max_completion_tokens": 0}, 400, BAD_REQUEST, "max_completion_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, 400, BAD_REQUEST, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, 400, BAD_REQUEST, "top_logprobs"),
    ({"top_logprobs": 1}, 400, BAD_REQUEST, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, 400, BAD_FORM, "body.tools"),
    ({"n": 2, "temperature": 0}, 400, BAD_REQUEST, "n"),
]

ACCEPTED_COMPLETIONS: list[dict[str, Any]] = [
    {"model": "byte-model"},
    {"model": None},
    {"temperature": 0, "n": 1},
    {"temperature": 2.0, "top_p": 1, "top_k": 0, "min_p": 0},
    {"top_k": -1, "temperature": None, "top_p": None, "stop": None},
    {"max_tokens": MAX_MODEL_LEN},
    {"max_tokens": None},
    {"seed": -(2**63)},
    {"logprobs": 20},
    {"stop": ["a", "b", "c", "d"]},
    {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "echo": False},
    {"best_of": 1, "suffix": None, "min_tokens": 0, "use_beam_search": False, "bad_words": []},
    {"response_format": {"type": "text"}, "structured_outputs": None, "allowed_token_ids": None},
    {"user": "me", "store": True, "metadata": {"a": "b"}, "no_such_field": [1]},
    {"prompt": "x" * (MAX_MODEL_LEN - 1)},
]


def assert_error(response: httpx.Response, status: int, type: str, param: str | None) -> None:
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert (response.status_code, body["error"]["type"], body["error"]["param"]) == (status, type, param), body
    assert body["error"]["code"] == status and body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "type", "param"), REFUSED_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_refused_completions(
    server: InProcessServer, body: dict[str, Any], status: int, type: str, param: str, stream: bool
) -> None:
    response = server.post(COMPLETIONS, {"prompt": "Hello", "stream": stream} | body)
    assert_error(response, status, type, param)
    assert server.engine.num_unfinished_requests == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "type", "param"), REFUSED_CHATS, ids=str)
def test_refused_chats(
    server: InProcessServer, body: dict[str, Any], status: int, type: str, param: str, stream: bool
) -> None:
    response = server.post(CHAT, {"messages": HELLO, "stream": stream} | body)
    assert_error(response, status, type, param)


def test_stream_options_need_a_stream(server: InProcessServer) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        response = server.post(path, body | {"stream_options": {"include_usage": True}})
        assert_error(response, 400, BAD_REQUEST, "stream_options")


@pytest.mark.parametrize("body", ACCEPTED_COMPLETIONS, ids=str)
def test_accepted_completions(server: InProcessServer, body: dict[str, Any]) -> None:
    response = server.post(COMPLETIONS, {"prompt": "Hello"} | body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("bad", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "x"' + b"[" * 100_000])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(server: InProcessServer, path: str, bad: bytes) -> None:
    response = server.request("POST", path, content=bad, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == BAD_FORM


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"min_p"])
def test_numbers_that_are_not_finite(server: InProcessServer, field: bytes, number: bytes) -> None:
    body = b'{"prompt": "x", "' + field + b'": ' + number + b"}"
    response = server.request("POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert_error(response, 400, BAD_FORM, "body." + field.decode())


@pytest.mark.parametrize("field", ["prompt", "stop", "model"])
def test_half_a_surrogate_pair(server: InProcessServer, field: str) -> None:
    body = b'{"prompt": "x", "' + field.encode() + b'": "\\ud83d"}'
    response = server.request("POST", COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert_error(response, 400, BAD_FORM, "body." + field)


def test_a_body_without_its_content_type_is_told_so(server: InProcessServer) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    response = server.request("POST", COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert_error(response, 400, BAD_FORM, "body")
    assert "application/json" in response.json()["error"]["message"]


def test_unknown_route_and_wrong_method(server: InProcessServer) -> None:
    assert_error(server.request("GET", "/v1/nothing"), 404, "Not Found", None)
    wrong = server.request("GET", COMPLETIONS)
    assert_error(wrong, 405, "Method Not Allowed", None)
    assert wrong.headers["allow"] == "POST"


def test_health_version_and_models(server: InProcessServer) -> None:
    response = server.request("GET", "/health")
    assert (response.status_code, response.content) == (200, b"")
    assert server.request("GET", "/version").json() == {"version": version("vllm-in-stages")}
    (card,) = server.request("GET", "/v1/models").json()["data"]
    assert card["id"] == card["root"] == "byte-model" and card["max_model_len"] == MAX_MODEL_LEN
    assert card["object"] == "model"
    assert server.request("GET", "/v1/models/byte-model").json() == card
    assert_error(server.request("GET", "/v1/models/other"), 404, "NotFoundError", "model")


def test_metrics_count_tokens(server: InProcessServer) -> None:
    def generated() -> float:
        lines = server.request("GET", "/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
        return float(line.split()[-1])

    before = generated()
    server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 7})
    assert generated() == before + 7


def test_impossible_tokens_have_a_finite_logprob(server: InProcessServer) -> None:
    body = {"prompt": "x", "messages": HELLO, "max_tokens": 1}
    completion = server.post(COMPLETIONS, body | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert list(completion["top_logprobs"][0].values()) == [0.0, -9999.0]
    chat = server.post(CHAT, body | {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]["logprobs"]
    assert [top["logprob"] for top in chat["content"][0]["top_logprobs"]] == [0.0, -9999.0]


@pytest.mark.parametrize(
    ("body", "text", "finish", "stop"),
    [
        ({"prompt": [65, EOS, 66]}, "b", "stop", None),
        ({"prompt": [65, EOS, 66], "ignore_eos": True}, "bcbc", "length", None),
        (
            {"prompt": [65, EOS, 66], "ignore_eos": True, "skip_special_tokens": False},
            "b<|endoftext|>cb<|endoftext|>c",
            "length",
            None,
        ),
        ({"prompt": [65, 66], "stop_token_ids": [66]}, "b", "stop", 66),
        ({"prompt": "abcd", "stop": ["cd", "x"]}, "ab", "stop", "cd"),
        ({"prompt": "abcd", "stop": "cd", "include_stop_str_in_output": True}, "abcd", "stop", "cd"),
    ],
)
def test_why_an_answer_ends(server: InProcessServer, body: dict[str, Any], text: str, finish: str, stop: Any) -> None:
    (choice,) = server.post(COMPLETIONS, body | {"max_tokens": 6}).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, finish, stop)


def test_served_model_names(make_server: Any) -> None:
    server = make_server(served_model_name=("gpt2", "second"))
    names = [card["id"] for card in server.request("GET", "/v1/models").json()["data"]]
    assert names == ["gpt2", "second"]
    for asked, answered in ((None, "gpt2"), ("", "gpt2"), ("second", "second"), ("gpt-2", "gpt-2")):
        response = server.post(COMPLETIONS, {"prompt": "x", "model": asked})
        assert response.json()["model"] == answered
    assert server.post(COMPLETIONS, {"prompt": "x", "model": "byte-model"}).status_code == 404


def test_tokenize_and_back(server: InProcessServer) -> None:
    text = "Hé\n"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(text.encode()) == len(answer["tokens"]) and answer["max_model_len"] == MAX_MODEL_LEN
    assert answer["token_strs"] == ["H", "Ã", "©", "Ċ"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
    assert chat["tokens"] == answer["tokens"] and chat["token_strs"] is None
    assert_error(server.post("/tokenize", {}), 400, BAD_REQUEST, "prompt")
    assert_error(server.post("/tokenize", {"prompt": "x", "model": "other"}), 404, "NotFoundError", "model")
    for beyond in (EOS + 1, 2**32, 2**63 - 1):
        assert server.post("/detokenize", {"tokens": [beyond]}).json() == {"prompt": ""}
        assert server.post("/detokenize", {"tokens": [beyond, *answer["tokens"]]}).json() == {"prompt": text}
    assert_error(server.post("/detokenize", {"tokens": [-1]}), 400, BAD_FORM, "body.tokens")
    assert_error(server.post("/detokenize", {"tokens": [10**40]}), 400, BAD_FORM, "body.tokens")


def test_the_tokenizers_settings_are_told_on_request(server: InProcessServer, make_server: Any, tmp_path: Path) -> None:
    refused = server.request("GET", "/tokenizer_info")
    assert_error(refused, 404, "NotFoundError", None)
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    bare = make_server(enable_tokenizer_info_endpoint=True).request("GET", "/tokenizer_info").json()
    assert bare.keys() == {"tokenizer_class", "added_tokens_decoder"}, "the stand-in has no files"
    shown = bare["added_tokens_decoder"][str(EOS)]
    assert (shown["content"], shown["special"]) == ("<|endoftext|>", True)
    own = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<s>",
        "add_prefix_space": False,
        "chat_template": "{{ own }}",
    }
    hidden = {"name_or_path": "/home/me/model", "vocab_file": "/home/me/model/vocab.json"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | hidden))
    found = byte_config()
    config = replace(found, model_config=replace(found.model_config, tokenizer_path=str(tmp_path)))
    tokenizer = server.engine.tokenizer.backend
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for template, shown in ((None, "{{ own }}"), ("{{ mine }}", "{{ mine }}")):
        asked = make_server(config=config, chat_template=template, enable_tokenizer_info_endpoint=True)
        answer = asked.request("GET", "/tokenizer_info").json()
        assert answer == own | {"chat_template": shown, "added_tokens_decoder": bare["added_tokens_decoder"]}
