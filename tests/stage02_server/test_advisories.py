"""What has gone wrong in servers of this kind before, each as a test: nothing of it may go wrong here."""

from __future__ import annotations

import json
import re
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import PATIENCE
from server_under_test import MAX_MODEL_LEN, InProcessServer

from stage02_server.protocol import ChatCompletionRequest, CompletionRequest
from stage03_engine.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}
MakeServer = Callable[..., InProcessServer]


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _forget(server: InProcessServer) -> None:
    server.client.added.clear()  # type: ignore[attr-defined]


def untouched(server: InProcessServer) -> None:
    """The engine has heard of nothing."""
    assert server.client.added == []  # type: ignore[attr-defined]


def send(server: InProcessServer, path: str, text: str) -> Any:
    return server.request("POST", path, content=text.encode(), headers=JSON)


# --- NaN and Infinity pass `x < low or x > high`


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_field_takes_a_number_that_is_none(server: InProcessServer, path: str, number: str) -> None:
    model = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    base = '{"max_tokens": 2, "prompt": "x", "messages": [{"role": "user", "content": "x"}], '
    for name in model.model_fields:
        for value in (number, f"[{number}]", f'{{"5": {number}}}'):
            response = send(server, path, base + f'"{name}": {value}}}')
            assert response.status_code == 400, (name, value, response.text)
            assert response.json()["error"]["param"] in (name, f"body.{name}"), (name, value, response.text)
    untouched(server)


# --- n is bounded before anything is copied n times


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("field", ["n", "best_of"])
@pytest.mark.parametrize("n", [129, 10**6, 2**31 - 1, 2**31, 10**100])
def test_many_answers_cost_nothing(server: InProcessServer, path: str, field: str, n: int) -> None:
    body = {"prompt": ["x"] * 64, "messages": MESSAGES, "temperature": 1.0, field: n}
    tracemalloc.start()
    response = server.post(path, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 400 and response.json()["error"]["param"] in (field, f"body.{field}")
    assert peak < 5_000_000
    untouched(server)


def test_prompts_times_answers_is_bounded_too(server: InProcessServer) -> None:
    error = server.post(COMPLETIONS, {"prompt": ["x"] * 64, "n": 128}).json()["error"]
    assert (error["code"], error["param"]) == (400, "n")
    untouched(server)


# --- min_tokens without max_tokens once waited for ever


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("min_tokens", [1, MAX_MODEL_LEN, 10**6, 2**63 - 1])
def test_min_tokens_without_max_tokens(server: InProcessServer, path: str, min_tokens: int) -> None:
    body = {"prompt": "Hello", "messages": MESSAGES, "max_tokens": None, "min_tokens": min_tokens}
    response = server.post(path, body)
    if response.status_code == 200:
        assert response.json()["usage"]["total_tokens"] <= MAX_MODEL_LEN
    else:
        assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"
    assert server.engine.num_unfinished_requests == 0


# --- other things that are bounded


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "x" * 1025),
        ("stop", ["x"] * 5),
        ("stop_token_ids", [1] * 1025),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("allowed_token_ids", [1] * 1000),
        ("bad_words", ["x"] * 257),
        ("bad_words", ["x" * 129]),
        ("guided_regex", "x" * 65_537),
        ("guided_choice", ["x" * 65_537]),
        ("guided_grammar", 'root ::= "a" ' * 10_000),
        ("guided_json", {"enum": ["x" * 65_537]}),
        ("cache_salt", ""),
        ("cache_salt", "x" * 1025),
        ("cache_salt", 5),
        ("cache_salt", ["x"]),
        ("cache_salt", "\ud800"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bounds(server: InProcessServer, field: str, value: Any) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2, field: value})
    for path, text in ((COMPLETIONS, body), (CHAT, json.dumps(json.loads(body) | {"messages": MESSAGES}))):
        if (path, field) == (CHAT, "logprobs"):
            continue
        error = send(server, path, text).json()["error"]
        assert error["code"] == 400 and error["param"] in (field, f"body.{field}"), error
    untouched(server)


SLOW = [
    {"guided_regex": "(?i)" + "[\u0001-\ud7ff]" * 5000},  # minutes in Python's `re`
    {"guided_regex": "(a?){1000}" * 500},
    {"guided_grammar": "\n" * 60_000 + "x ::= 3"},
    {"guided_grammar": " " * 60_000 + 'root ::= "a"'},
    {"guided_json": {"pattern": "(?i)" + "[\u0001-\ud7ff]" * 5000}},
]


@pytest.mark.parametrize("fields", SLOW, ids=lambda fields: ascii(fields)[:40])
def test_no_grammar_is_worked_on_where_all_clients_wait(server: InProcessServer, fields: dict[str, Any]) -> None:
    """The API process looks at its length and little more; the engine, which may refuse it, is an echo here."""
    begin = time.process_time()
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1} | fields)
    assert time.process_time() - begin < 0.1 * PATIENCE  # seconds of this process alone; it takes some thousandths


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"prompt": ' + "[" * 100_000, "1" * 5000])
def test_deep_and_long_json(server: InProcessServer, text: str) -> None:
    assert send(server, COMPLETIONS, text).status_code == 400


# --- a template that comes with a request is a program that a stranger wrote


@pytest.mark.parametrize("path", [CHAT, "/tokenize", COMPLETIONS, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "smuggled",
    [
        {"chat_template": "MARK {{ 7 * 7 }}"},
        {"chat_template_kwargs": {"chat_template": "MARK {{ 7 * 7 }}"}},
        {"chat_template_kwargs": {"tokenize": False, "chat_template": "MARK {{ 7 * 7 }}"}},
        {"extra_body": {"chat_template": "MARK {{ 7 * 7 }}"}},
    ],
)
def test_no_request_brings_its_own_template(server: InProcessServer, path: str, smuggled: dict[str, Any]) -> None:
    body = (
        {"messages": MESSAGES, "max_tokens": 20}
        if path in (CHAT, "/tokenize", "/v1/messages")
        else {"prompt": "Hello", "input": "Hello"}
    )
    body |= {"model": "byte-model"}
    response = server.post(path, body | smuggled)
    assert response.status_code in (200, 400, 404)
    if response.status_code == 200:  # a field that does not exist on this route changes nothing
        plain = server.post(path, body).json()
        assert response.json().get("content") == plain.get("content")
        assert response.json().get("choices") == plain.get("choices") and response.json().get("tokens") == plain.get(
            "tokens"
        )
    if path in (CHAT, "/tokenize") and "chat_template" in smuggled:
        assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template"


# --- nothing is fetched


def test_no_url_is_fetched(server: InProcessServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        parts: list[dict[str, Any]] = [
            {"type": kind, kind: {"url": url}}
            for kind in ("image_url", "video_url", "audio_url", "file", "input_image")
        ]
        for part in parts:
            response = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert response.status_code == 400
        server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "guided_json": {"$ref": url}})
        with pytest.raises(BlockingIOError):
            listener.accept()


# --- errors leak nothing of the inside

INSIDE = re.compile(
    r"0x[0-9a-fA-F]{6,}|Traceback|File \"|/(home|root|tmp|usr|work|var)/|site-packages|\.py\b|<object|at 0x"
)
ODD = [
    b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "x", "max_tokens": {}}', b'{"prompt": "x", "stop": [{}]}',
    b'{"prompt": "x", "guided_json": "{"}', b'{"messages": [{"role": []}]}',
    b'{"prompt": "x", "guided_grammar": "root"}', b'{"prompt": "x", "model": "/etc/passwd"}', b'{"tokens": [-1]}',
    b'{"prompt": "x", "vllm_xargs": {"a": []}}', b'{"prompt": "x", "logit_bias": {"a": 1}}', b'{"messages": 1}',
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", ODD, ids=lambda body: body.decode("latin-1")[:40])
def test_refusals_tell_nothing_of_the_inside(server: InProcessServer, path: str, body: bytes) -> None:
    response = server.request("POST", path, content=body, headers=JSON)
    assert response.status_code in (200, 400, 404), response.text  # /tokenize ignores most of these fields
    assert not INSIDE.search(response.text), response.text


class Broken:
    """An engine whose every method fails and says too much."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"secret of {self!r} in {__file__}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_tells_nothing_of_the_inside(make_server: MakeServer, stream: bool) -> None:
    server = make_server(server_dev_mode=True)
    handler = server.app.state.openai_serving_completion

    async def fails(*_: Any) -> Any:
        raise RuntimeError(f"secret of {handler!r} in {__file__}")
        yield

    handler._generate = fails
    response = server.post(COMPLETIONS, {"prompt": "x", "stream": stream})
    assert "InternalServerError" in response.text
    server.app.state.services.engine = Broken()
    more = server.request("POST", "/reset_prefix_cache")
    assert more.status_code == 500
    for text in (response.text, more.text):
        assert not INSIDE.search(text) and "secret" not in text and "test_advisories" not in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.x.y }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].getcwd() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__.co_filename }}",
        "{{ messages|map('x')|list }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_tells_nothing_of_the_inside(make_server: MakeServer, template: str) -> None:
    try:
        response = make_server(chat_template=template).post(CHAT, {"messages": MESSAGES})
    except ConfigError:  # refused at the start
        return
    assert response.status_code == 400 and not INSIDE.search(response.text), response.text
