"""Bodies, queries and cookies of more items than anybody needs: refused before they are parsed, while all others are served.

The long form measures: `pytest -m long -k standstill tests/stage02_server/test_bounds.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import InProcessServer, ServerProcess
from standstill import LONGEST, Standstill

from stage02_server.features.hardening.body_limits import ItemCounter
from stage02_server.features.responses.protocol import InputItem, to_messages

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.integers()
    | st.text(st.sampled_from('a,[{:"\\\n]}é€😀')),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.sampled_from('a,"\\:')), inner, max_size=5),
    max_leaves=25,
)


def items(value: Any) -> int:
    """What the counter is to find: an opening bracket per list and object, a comma between two items, a colon per key."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(items, value.values()))
    return 1 + max(0, len(value) - 1) + sum(map(items, value)) if isinstance(value, list) else 0


@given(value=values, ascii=st.booleans(), cuts=st.lists(st.integers(0, 400)))
def test_items_are_counted_wherever_the_body_is_cut(value: Any, ascii: bool, cuts: list[int]) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    ends = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    counter = ItemCounter()
    for start, end in pairwise(ends):
        counter.add(body[start:end])
    assert counter.count == items(value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_no_encoding_hides_items(encoding: str) -> None:
    body = '{"∀": "∀", "tokens": [' + "1," * 1000 + "1]}"  # in UTF-16 half of the character ∀ is a quote
    for size in (1, 7, 10_000):
        raw, counter = body.encode(encoding), ItemCounter()
        for start in range(0, len(raw), size):
            counter.add(raw[start : start + size])
        assert counter.count >= 1000


def test_counting_is_linear() -> None:
    def seconds(body: bytes) -> float:
        found = []
        for _ in range(5):
            start = time.thread_time()
            ItemCounter().add(body)
            found.append(time.thread_time() - start)
        return min(found)

    for piece in (rb'"\\\\"', b'"",', b"[1],", rb"\"", b'"'):
        assert seconds(piece * 80_000) < 10 * seconds(piece * 20_000) + 0.001, piece


MANY = 327_680
OVER: list[tuple[str, str]] = [
    ("/detokenize", '{"tokens": [' + "7," * MANY + "7]}"),
    (COMPLETIONS, '{"prompt": [' + "7," * MANY + "7]}"),
    (COMPLETIONS, '{"prompt": [' + "[1]," * (MANY // 2) + "[1]]}"),
    (COMPLETIONS, '{"prompt": "a", "x": [' + '"",' * MANY + '""]}'),
    (COMPLETIONS, "{" + '"":1,' * (MANY // 2) + '"prompt": "a"}'),
    ("/v1/messages", "[" + "{}," * (MANY // 2) + "{}]"),
    (COMPLETIONS, "[" * (MANY + 1)),
]


@pytest.mark.parametrize(("path", "body"), OVER, ids=lambda value: value[:20])
def test_too_many_items_are_refused_before_they_are_parsed(server: InProcessServer, path: str, body: str) -> None:
    answer = server.request("POST", path, content=body, headers=JSON)
    assert answer.status_code == 413 and "--max-request-items" in answer.text, answer.text
    assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_as_many_as_allowed_are_served(server: InProcessServer, make_server: Callable[..., InProcessServer]) -> None:
    assert server.post("/detokenize", {"tokens": [7] * 327_000}).status_code == 200
    text = ',"{[:' * 100_000  # in a text there may be any number
    assert server.post("/tokenize", {"prompt": text}).json()["count"] == len(text)
    small = make_server(max_request_items=1024)
    assert small.post("/detokenize", {"tokens": [7] * 1000}).status_code == 200
    assert small.post("/detokenize", {"tokens": [7] * 1100}).status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 16_385}, "messages"),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{}] * 16_385}, "messages"),
        (COMPLETIONS, {"prompt": "a", "metadata": {str(key): 1 for key in range(4097)}}, "metadata"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(key): "x" for key in range(60_000)}}, "body.logit_bias"),
        (COMPLETIONS, {"prompt": "a", "vllm_xargs": {"x": [[]] * 60_000}}, "body.vllm_xargs"),
        ("/v1/chat/completions", {"messages": [], "documents": [1] * 60_000}, "body.documents"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_within_the_body_is_bounded_too(
    server: InProcessServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert path == "/v1/messages" or answer.json()["error"]["param"] == param
    assert len(answer.content) < 1000


def test_queries_forms_and_cookies_have_a_bounded_number_of_parts(server: InProcessServer) -> None:
    good = {"prompt": "a", "max_tokens": 1}
    assert server.post(COMPLETIONS + "?" + "a=1&" * 1000, good).status_code == 200
    assert server.post(COMPLETIONS + "?" + "a=1&" * 1024, good).status_code == 400
    assert server.post(COMPLETIONS, good, headers={"cookie": "a=1;" * 1000}).status_code == 200
    assert server.post(COMPLETIONS, good, headers={"cookie": "a=1;" * 1024}).status_code == 431
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.request("POST", COMPLETIONS, content="a=1&" * 1024, headers=form).status_code == 413


def test_a_refusal_does_not_repeat_megabytes(server: InProcessServer) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "a", "model": "m" * 1_000_000})
    assert answer.status_code == 404 and len(answer.content) < 5000


def test_thousands_of_calls_become_one_turn_in_linear_time() -> None:
    def seconds(count: int) -> float:
        calls = [InputItem(type="function_call", call_id=str(n), name="f", arguments="{}") for n in range(count)]
        found = []
        for _ in range(3):
            start = time.thread_time()
            (message,) = to_messages(calls)
            found.append(time.thread_time() - start)
        assert [call.id for call in message.tool_calls or []] == [str(n) for n in range(count)]
        return min(found)

    assert seconds(8000) < 10 * seconds(2000)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("gpt2-tiny", "--port", "0", "--engine", "echo", "--disable-uvicorn-access-log")
    yield server.wait_until_ready()
    server.close()


USER = {"role": "user", "content": "a"}
FULL_SIZE: dict[str, tuple[str, str]] = {
    "token ids": ("/detokenize", '{"tokens": [' + "7," * 3_900_000 + "7]}"),
    "top-level fields": (COMPLETIONS, "{" + ",".join(f'"{n}":1' for n in range(500_000)) + "}"),
    "as many token ids as allowed": (COMPLETIONS, '{"prompt": [' + "7," * 327_000 + "7]}"),
    "biases": (COMPLETIONS, json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(65_000)}})),
    "wrong values": (COMPLETIONS, json.dumps({"prompt": "a", "vllm_xargs": {"x": [[]] * 65_000}})),
    "long integers": (COMPLETIONS, '{"x": [' + ",".join(["9" * 4000] * 2000) + "]}"),
    "blocks": (
        "/v1/messages",
        json.dumps({"model": "gpt2-tiny", "max_tokens": 2,
                    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 16_000}]}),
    ),
    "calls": (
        "/v1/responses",
        json.dumps({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}] * 8000}),
    ),
    "messages": ("/v1/chat/completions", json.dumps({"messages": [USER] * 16_000, "max_tokens": 2})),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FULL_SIZE)
def test_standstill_of_large_bodies(url: str, name: str) -> None:
    path, body = FULL_SIZE[name]
    with Standstill(url) as standstill:
        answer = httpx.post(url + path, content=body, headers=JSON, timeout=PATIENCE)
    assert answer.status_code in (400, 413), answer.text[:1000]
    assert standstill.seconds < LONGEST
