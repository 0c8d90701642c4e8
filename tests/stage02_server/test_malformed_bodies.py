"""Bodies that no client would send on purpose: never a 500, never a hang, and the next request works.

The long form sends 10,000: `pytest -m long tests/stage02_server/test_malformed_bodies.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import BaseModel, ValidationError
from server_under_test import InProcessServer

from stage02_server.features.messages.protocol import AnthropicMessagesRequest
from stage02_server.features.pooling.protocol import EmbeddingRequest
from stage02_server.features.responses.protocol import ResponsesRequest
from stage02_server.features.tokenize.tokenize import DetokenizeRequest, TokenizeRequest
from stage02_server.protocol import ChatCompletionRequest, CompletionRequest

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4},
    "/v1/messages": {"model": "byte-model", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "byte-model", "messages": [{"role": "user", "content": "a b"}]},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [97, 98]},
    "/abort_requests": {"request_ids": ["cmpl-x"]},
}
FIELDS = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "best_of", "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs",
    "logit_bias", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "echo", "suffix", "user",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "use_beam_search",
    "length_penalty", "early_stopping", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "priority",
    "cache_salt", "truncate_prompt_tokens", "vllm_xargs", "tools", "tool_choice", "chat_template", "tokens",
    "add_special_tokens", "return_token_strs", "request_ids", "request_id", "kv_transfer_params", "documents",
    "system", "thinking", "output_config", "stop_sequences", "metadata",
]  # fmt: skip
odd_numbers = st.sampled_from(
    [0, -1, 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**30, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -0.0]
)
odd_texts = st.text(max_size=20) | st.sampled_from(["", "\x00", "\ud800", "💥" * 50, "{{", "{% for %}", "[" * 200])
scalars = st.none() | st.booleans() | odd_numbers | odd_texts | st.integers() | st.floats()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_texts | st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)
changes = st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=4)


def cut(raw: bytes, at: int, junk: bytes) -> bytes:
    """A body that ends, or goes wrong, in the middle."""
    return raw[: at % (len(raw) + 1)] + junk


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and bytes for it: noise, any JSON, or a good body with some fields made odd, perhaps broken off."""
    path = draw(st.sampled_from(sorted(VALID)))
    kind = draw(st.sampled_from(["noise", "json", "changed", "changed", "changed", "broken"]))
    if kind == "noise":
        return path, draw(st.binary(max_size=60))
    if kind == "json":
        return path, json.dumps(draw(values)).encode()
    raw = json.dumps(VALID[path] | draw(changes)).encode()
    return path, raw if kind == "changed" else cut(raw, draw(st.integers(0, 999)), draw(st.binary(max_size=4)))


def check(server: InProcessServer, path: str, body: bytes, content_type: str) -> None:
    """The answer is one that a client understands. (`request` itself fails after 20 s without an answer.)"""
    answer = server.request("POST", path, content=body, headers={"Content-Type": content_type})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert path.startswith("/v1/messages") or error["code"] == answer.status_code
        assert error["message"] and error["type"]
        assert len(answer.content) < 3000, "the offending value comes back"
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert '"InternalServerError"' not in answer.text and '"api_error"' not in answer.text
        assert answer.text.endswith(("data: [DONE]\n\n", 'data: {"type": "message_stop"}\n\n'))
    follow(server)


def follow(server: InProcessServer) -> None:
    """The next request works, and nothing of the last one is left."""
    good: httpx.Response = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 3})
    assert good.status_code == 200 and good.json()["choices"][0]["text"] == "aba"
    assert server.engine.num_unfinished_requests == 0


CONTENT_TYPES = st.sampled_from(["application/json"] * 8 + ["text/plain", "application/json; charset=latin-1", "x"])


def _check_many(server: InProcessServer, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies(), CONTENT_TYPES)
    def run(body: tuple[str, bytes], content_type: str) -> None:
        check(server, *body, content_type)

    run()


@pytest.mark.parametrize("examples", [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_a_malformed_body_is_refused_and_harms_nobody(
    make_server: Callable[..., InProcessServer], examples: int
) -> None:
    _check_many(make_server(server_dev_mode=True), examples)


@pytest.mark.parametrize("path", sorted(VALID))
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"x"', b"{", b'{"a":', b"\xff\xfe{}", b"[" * 100_000, b'{"n":' * 5000, b"9" * 5000,
     b'{"max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800", "tokens": ["\\ud800"]}'],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_what_parsers_stumble_over(server: InProcessServer, path: str, body: bytes) -> None:
    check(server, path, body, "application/json")


PART, CALL = [{"role": "user", "content": [{}] * 1000}], [{"role": "user", "content": "a", "tool_calls": [{}] * 1000}]
RESULT = [{"role": "user", "content": [{"type": "tool_result", "content": [{}] * 1000}]}]
WRONG_ITEMS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *[(CompletionRequest, {name: [{}] * 1000}) for name in ("prompt", "stop", "bad_words", "guided_choice")],
    *[
        (CompletionRequest, {name: [{}] * 1000})
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
    ],
    *[(kind, {"messages": value}) for kind in (ChatCompletionRequest, TokenizeRequest) for value in (PART, CALL)],
    *[(AnthropicMessagesRequest, {"messages": value}) for value in (PART, RESULT, [{}] * 1000)],
    *[(AnthropicMessagesRequest, {name: [{}] * 1000}) for name in ("system", "stop_sequences", "tools")],
    *[(ResponsesRequest, {"input": value}) for value in (PART, [5] * 1000)],
    (ResponsesRequest, {"include": [{}] * 1000}),
    (EmbeddingRequest, {"input": [{}] * 1000}),
    (DetokenizeRequest, {"tokens": [{}] * 1000}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG_ITEMS)
def test_of_a_thousand_wrong_items_the_first_is_enough(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """65,536 errors take a second to write, while all other clients wait."""
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate(body)
    assert refusal.value.error_count() < 20


def test_a_body_has_a_bounded_number_of_fields(server: InProcessServer) -> None:
    many = {f"unknown{number}": number for number in range(1025)}
    for path in VALID.keys() - {"/abort_requests"}:
        answer = server.post(path, VALID[path] | many)
        assert answer.status_code == 400 and "at most 1024 fields" in answer.json()["error"]["message"], path
