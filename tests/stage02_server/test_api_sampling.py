"""The sampling fields of both endpoints: what is refused under which name, and what arrives in the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_under_test import EOS, MAX_MODEL_LEN, InProcessServer, events

from stage02_server.protocol import ChatCompletionRequest, CompletionRequest
from stage03_engine.sampling_params import SamplingParams

ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": "much"}, "body.frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {str(EOS + 1): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "high"}}, "body.logit_bias"),
    ({"logit_bias": {str(10**40): 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [EOS + 1]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 1000}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": MAX_MODEL_LEN, "max_tokens": None}, "min_tokens"),
    ({"vllm_xargs": {"a": [[1]]}}, "body.vllm_xargs"),
    ({"vllm_xargs": {"a": {"b": 1}}}, "body.vllm_xargs"),
    ({"vllm_xargs": {"a": None}}, "body.vllm_xargs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 10**9}, "best_of"),
    ({"best_of": 3, "n": 2, "temperature": 0}, "n"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": True, "n": 0}, "n"),
    ({"use_beam_search": True, "n": 65}, "n"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
    ({"use_beam_search": True, "early_stopping": "never"}, "body.early_stopping"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({"use_beam_search": True, "min_tokens": 1}, "min_tokens"),
    ({"use_beam_search": True, "guided_regex": "a+"}, "use_beam_search"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "body.truncation_side"),
    ({"stream_interval": 0}, "body.stream_interval"),
    ({"stream_interval": 2**31}, "body.stream_interval"),
    ({"request_id": ""}, "body.request_id"),
    ({"request_id": "a b"}, "body.request_id"),
    ({"request_id": "a\n"}, "body.request_id"),
    ({"request_id": "x" * 129}, "body.request_id"),
    ({"return_token_ids": "some"}, "body.return_token_ids"),
    ({"return_tokens_as_token_ids": 2}, "body.return_tokens_as_token_ids"),
    ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, "repetition_detection"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [EOS + 1], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [-1], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": ["a"], "logprobs": 1}, "body.logprob_token_ids"),
    ({"use_beam_search": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"kv_transfer_params": {"a": 1}}, "body.kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["completions", "chat"])
@pytest.mark.parametrize(("wish", "param"), REFUSED, ids=str)
def test_refused(server: InProcessServer, path: str, body: dict[str, Any], wish: dict[str, Any], param: str) -> None:
    response = server.post(path, body | wish)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert server.engine.num_unfinished_requests == 0


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["completions", "chat"])
def test_every_field_arrives_in_the_engine(
    make_server: Any, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    arrived: list[SamplingParams] = []
    process_inputs = server.engine.input_processor.process_inputs

    def spy(request_id: str, prompt: Any, params: SamplingParams, **others: Any) -> Any:
        arrived.append(params)
        return process_inputs(request_id, prompt, params, **others)

    monkeypatch.setattr(server.engine.input_processor, "process_inputs", spy)
    wishes = {
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "allowed_token_ids": [1, 2],
        "bad_words": ["x"], "min_tokens": 2, "truncate_prompt_tokens": 3, "spaces_between_special_tokens": False,
        "max_tokens": 9, "seed": 3, "stop_token_ids": [8], "truncation_side": "right", "stream_interval": 7,
    }  # fmt: skip
    others = {"logit_bias": {"5": 1}, "vllm_xargs": {"a": True, "b": 2, "c": 0.5, "d": "x", "e": [1, "y"]}}
    assert server.post(path, body | wishes | others).status_code == 200
    assert server.post(path, body | dict.fromkeys([*wishes, *others])).status_code == 200
    assert {name: getattr(arrived[0], name) for name in wishes} == wishes
    assert arrived[0].logit_bias == {5: 1.0} and repr(arrived[0].extra_args) == repr(others["vllm_xargs"])
    most = 16 if path == "/v1/completions" else None
    assert arrived[1] == SamplingParams(max_tokens=most, output_kind=arrived[1].output_kind)


def test_a_truncated_prompt_counts_as_what_is_left(server: InProcessServer) -> None:
    body = {"prompt": "x" * 50 + "abc", "truncate_prompt_tokens": 3, "max_tokens": 4}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "abca" and answer["usage"]["prompt_tokens"] == 3
    (choice,) = server.post("/v1/completions", body | {"truncation_side": "right", "echo": True}).json()["choices"]
    assert choice["text"] == "xxx" + "xxxx"


def test_n_times_prompts_is_bounded_before_anything_is_made(server: InProcessServer) -> None:
    response = server.post("/v1/completions", {"prompt": ["x"] * 100, "n": 100})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert len(server.post("/v1/completions", {"prompt": ["x"] * 32, "n": 4, "max_tokens": 1}).json()["choices"]) == 128


@pytest.mark.parametrize("stream", [False, True])
def test_the_best_of_equal_answers_is_the_one_answer(server: InProcessServer, stream: bool) -> None:
    """At temperature 0 nothing is chosen, so that nothing speaks against a stream either."""
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "stream": stream}
    answers = [server.post("/v1/completions", body | more).text for more in ({}, {"best_of": 3})]
    one, best = (events(answer) if stream else [json.loads(answer)] for answer in answers)
    assert [chunk["choices"][0]["text"] for chunk in best] == [chunk["choices"][0]["text"] for chunk in one]
    assert len(best[0]["choices"]) == 1 and (stream or best[0]["usage"] == one[0]["usage"])
    assert not server.client.added[-1].startswith(("1_", "2_")), "one answer was generated"


def test_best_of_answers_and_counts_only_n(server: InProcessServer) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "best_of": 5, "max_tokens": 3}
    answer = server.post("/v1/completions", body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "aba"), (1, "aba"), (2, "cdc"), (3, "cdc")]
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": None,
    }
    assert server.client.added[-1].startswith("4_") and server.engine.num_unfinished_requests == 0


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=["completions", "chat"])
def test_beam_search_answers_with_its_width(server: InProcessServer, path: str, body: dict[str, Any]) -> None:
    wishes = {"use_beam_search": True, "n": 3, "max_tokens": 4, "temperature": 0, "top_p": 0.9, "seed": 1}
    answer = server.post(path, body | wishes).json()
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    first = server.post(path, body | {"max_tokens": 1}).json()["choices"][0]
    start = first["text"] if "text" in first else first["message"]["content"]
    assert texts[0] == start * 4, "each step asks for the sequence's first token again"
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 12 and server.engine.num_unfinished_requests == 0


def test_logprobs_cannot_come_with_beam_search(server: InProcessServer) -> None:
    response = server.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "logprobs": 0})
    assert response.json()["error"]["param"] == "logprobs"


def test_prompt_logprobs_in_both_shapes(server: InProcessServer) -> None:
    body = {"prompt_logprobs": 2, "n": 2, "max_tokens": 1}
    first, second = server.post("/v1/completions", {"prompt": "abc"} | body).json()["choices"]
    entries = first["prompt_logprobs"]
    assert entries == second["prompt_logprobs"] and entries[0] is None and len(entries) == 3
    token = str(ord("b") - ord("!"))
    assert entries[1][token] == {"logprob": 0.0, "rank": 1, "decoded_token": "b"}
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]} | body).json()
    assert len(chat["prompt_logprobs"]) == len(
        server.post("/tokenize", {"messages": [{"role": "user", "content": "abc"}]}).json()["tokens"]
    )
    bare = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}).json()["choices"][0]
    assert bare["prompt_logprobs"] is None


def test_named_tokens_are_reported_instead_of_the_likeliest(server: InProcessServer) -> None:
    """In their order, whatever k is; the echoed prompt keeps its k likeliest."""
    named = {"logprobs": True, "logprob_token_ids": [87, 64, 7], "return_tokens_as_token_ids": True}
    shown = ["token_id:87", "token_id:64", "token_id:7"]
    chat = server.post("/v1/chat/completions", ENDPOINTS[1][1] | named | {"max_tokens": 2, "top_logprobs": 1}).json()
    for token in chat["choices"][0]["logprobs"]["content"]:
        others = [name for name in shown if name != token["token"]]
        assert [entry["token"] for entry in token["top_logprobs"]] == [token["token"], *others]
    body = {"prompt": "ab", "max_tokens": 3, "echo": True, "prompt_logprobs": 5} | named | {"logprobs": 1}
    told = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    answer = [list(top) for top in told["top_logprobs"][2:]]
    assert answer == [
        ["token_id:64", "token_id:87", "token_id:7"],
        ["token_id:65", *shown],
        ["token_id:64", "token_id:87", "token_id:7"],
    ]
    assert list(told["top_logprobs"][1]) == ["token_id:65"]
    none = server.post("/v1/completions", body | {"logprob_token_ids": [], "echo": False}).json()["choices"][0]
    assert [len(top) for top in none["logprobs"]["top_logprobs"]] == [1, 1, 1]


def test_max_tokens_of_the_models_own_defaults_is_an_upper_limit() -> None:
    completion = CompletionRequest.model_validate({"prompt": "a"}).to_sampling_params
    assert (completion(None).max_tokens, completion({"max_tokens": 20}).max_tokens) == (16, 16)
    for limit, asked, expected in ((None, None, None), (None, 9, 9), (4, None, 4), (4, 3, 3), (4, 4, 4), (4, 5, 4)):
        for name in ("max_tokens", "max_completion_tokens"):
            chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], name: asked})
            defaults = {} if limit is None else {"max_tokens": limit}
            assert chat.to_sampling_params(defaults).max_tokens == expected, (limit, asked, name)
