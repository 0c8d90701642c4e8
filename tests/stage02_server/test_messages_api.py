"""/v1/messages: what goes in, what comes out, the order of its events, its errors, and what Anthropic's own types say about them.
The echo engine says what it was told, so a message that holds a call makes an answer with one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from hypothesis import given, strategies as st
from pydantic import TypeAdapter
from server_under_test import InProcessServer, RecordingEcho, byte_config

from stage02_server.features.messages.maker import arguments_of
from stage02_server.features.messages.protocol import AnthropicMessagesRequest
from stage03_engine.core.features.pooling.manifest import PoolingConfig
from stage03_engine.errors import EngineDeadError

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MakeServer = Callable[..., InProcessServer]
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
LOOK = {"name": "look", "description": "See.", "input_schema": {"properties": {"at": {"type": "string"}}}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "moon"}}
ROLES = (
    "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.tool_calls or '' }}{{ m.reasoning or '' }};{% endfor %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    config = byte_config(1024)
    server = InProcessServer(
        RecordingEcho(config=config), config, enable_auto_tool_choice=True, tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )  # fmt: skip
    yield server
    server.close()


@pytest.fixture(scope="module")
def templated() -> Iterator[InProcessServer]:
    config = byte_config(1024)
    server = InProcessServer(RecordingEcho(config=config), config, chat_template=ROLES)
    yield server
    server.close()


def said(text: Any, **body: Any) -> dict[str, Any]:
    return {"model": "byte-model", "max_tokens": 8, "messages": [{"role": "user", "content": text}]} | body


def ask(server: InProcessServer, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(MESSAGES, body)
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json())
    return answer.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events, each of which names its type twice and is one of Anthropic's."""
    *blocks, rest = text.split("\n\n")
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        STREAM_EVENT.validate_python(event)
        found.append(event)
    assert rest == ""
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together, in whose stream every block ends before the next begins."""
    message, written = events[0]["message"], ""
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, written = True, ""
            continue
        block = message["content"][-1]
        assert is_open and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = arguments_of(written)
        elif event["delta"]["type"] == "input_json_delta":
            written += event["delta"]["partial_json"]
        else:
            field = event["delta"]["type"].removesuffix("_delta")
            block[field] += event["delta"][field]
    assert not is_open and events[-2]["type"] == "message_delta"
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in message["content"]]
    return {k: v for k, v in message.items() if k not in ("id", "metrics")} | {"content": content}


THINKS_AND_CALLS = f"Hm.</think>Yes. {CALL} and {CALL}#"


@pytest.mark.parametrize(
    ("body", "content", "stopped"),
    [
        (said("</think>Hello", max_tokens=13), [("text", "Hello")], ("max_tokens", None)),
        (said("</think>Hello!", stop_sequences=["!", "l"], max_tokens=20), [("text", "He")], ("stop_sequence", "l")),
        (
            said(THINKS_AND_CALLS, tools=[LOOK], stop_sequences=["#"], max_tokens=300),
            [("thinking", "Hm."), ("text", "Yes. "), ("look", {"at": "é"}), ("text", "and "), ("look", {"at": "é"})],
            ("tool_use", None),
        ),
        (
            said(THINKS_AND_CALLS, tools=[LOOK], stop_sequences=["#"], max_tokens=300,
                 tool_choice={"type": "auto", "disable_parallel_tool_use": True}, thinking={"type": "disabled"}),
            [("text", "Yes. "), ("look", {"at": "é"}), ("text", "and ")],
            ("tool_use", None),
        ),
        (
            said(THINKS_AND_CALLS, tools=[LOOK], max_tokens=65),
            [("thinking", "Hm."), ("text", "Yes. "), ("look", {"INVALID_JSON": '{"at": "'})],
            ("max_tokens", None),
        ),
        (
            said(THINKS_AND_CALLS, tools=[LOOK], tool_choice={"type": "none"}, stop_sequences=["#"], max_tokens=300),
            [("thinking", "Hm."), ("text", f"Yes. {CALL} and {CALL}")],
            ("stop_sequence", "#"),
        ),
        (said("</think>#", stop_sequences=["#"], max_tokens=20), [], ("stop_sequence", "#")),
    ],
)  # fmt: skip
def test_blocks_and_why_the_answer_ends(
    server: InProcessServer, body: dict[str, Any], content: list[tuple[str, Any]], stopped: tuple[str, str | None]
) -> None:
    message = ask(server, body)
    kinds = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    found = [
        (block["name"] if block["type"] == "tool_use" else block["type"], block[kinds[block["type"]]])
        for block in message["content"]
    ]
    assert found == content and (message["stop_reason"], message["stop_sequence"]) == stopped
    assert all(block["id"].startswith("toolu_") for block in message["content"] if block["type"] == "tool_use")
    streamed = message_of(events_of(server.post(MESSAGES, body | {"stream": True}).text))
    assert without_ids(streamed) == without_ids(message)


@given(text=st.text(alphabet='ab é✓<tool_c>{}"', max_size=20), limit=st.integers(1, 40), thinks=st.booleans())
def test_a_stream_and_a_whole_answer_say_the_same(server: InProcessServer, text: str, limit: int, thinks: bool) -> None:
    body = said(("</think>" if not thinks else "") + text + "x", max_tokens=limit, tools=[LOOK])
    streamed = message_of(events_of(server.post(MESSAGES, body | {"stream": True}).text))
    assert without_ids(streamed) == without_ids(ask(server, body))
    assert streamed["usage"]["output_tokens"] == limit


def prompt_of(server: InProcessServer, body: dict[str, Any]) -> str:
    """The echo engine answers with its prompt, and begins again when it is through: the usage says where."""
    message = ask(server, body | {"max_tokens": 512})
    usage = message["usage"]
    text = "".join(block["text"] for block in message["content"])
    counted = server.post(
        COUNT, {name: body[name] for name in ("model", "messages", "system", "tools", "tool_choice") if name in body}
    )
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": total, "context_management": {"original_input_tokens": total}}
    return text.encode()[:total].decode()


TALK = [
    {"role": "user", "content": "Look!"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                      {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So."}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
                                  "content": [{"type": "text", "text": "It is"}, {"type": "text", "text": "bright."}]},
                                 {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (said("Hello", system="Be kind."), "system=Be kind.;user=Hello;"),
        (
            said("Hello", system=[{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be"},
                                  {"type": "text", "text": " kind."}]),
            "system=Be kind.;user=Hello;",
        ),
        (said([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]), "user=a\nb;"),
        (said([]), "user=;"),
        (
            said("x", messages=TALK, tools=[LOOK]),
            "user=Look!;assistant=So.[{'type': 'function', 'function': {'name': 'look', 'arguments': {'at': 'moon'}}, "
            "'id': 'toolu_1'}]Hm.;tool=It is\nbright.;user=And?;",
        ),
        (said("x", messages=[*said("a")["messages"], {"role": "system", "content": "b"}]), "user=a;system=b;"),
        (said("x", messages=[{"role": "ctx", "content": "a"}, {"role": "msg", "content": "b"}]), "user=a;user=b;"),  # Claude Code
    ],
)  # fmt: skip
def test_a_conversation_becomes_a_chat(templated: InProcessServer, body: dict[str, Any], prompt: str) -> None:
    body |= {"tool_choice": {"type": "none"}} if "tools" in body else {}
    assert prompt_of(templated, body) == prompt


def test_without_a_template_texts_are_joined(make_server: MakeServer) -> None:
    server = make_server(config=byte_config(1024))
    body = said("Hello", system="Be kind. ", tools=[LOOK], tool_choice={"type": "none"})
    assert prompt_of(server, body) == "Be kind. Hello"


ONLY_TEXT = "Only text can be served, not a content block of type"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (said("x", model=""), "model: String should have at least 1 character."),
        ({"model": "byte-model", "messages": [{"role": "user", "content": "x"}]}, "max_tokens: Field required."),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, "model: Field required."),
        (said("x", max_tokens=0), "max_tokens: Input should be greater than or equal to 1."),
        (said("x", max_tokens=5000), "max_tokens"),
        (said("x", messages=[]), "messages must hold at least one message."),
        (said("x", messages=[{"role": "tool", "content": "x"}]), "messages: Input should be 'user', 'assistant' or 'system'"),
        (said("\ud800"), "messages: Input should be a valid string"),
        (said("x" * 2000), "context length"),
        (said([{"type": "image", "source": {"type": "base64", "data": ""}}]), "The source of an image is of type base64"),
        (said([{"type": "document"}]), f"{ONLY_TEXT} 'document'."),
        (said([{"type": "text"}]), "A text block needs text."),
        (said("x", system=[{"type": "image"}]), f"{ONLY_TEXT} 'image'."),
        (said([USE]), f"{ONLY_TEXT} 'tool_use' in a message of role 'user'."),
        (said("x", messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]), "needs id, name and input"),
        (said([{"type": "tool_result", "content": "x"}]), "A tool_result block needs tool_use_id."),
        (said([{"type": "tool_result", "tool_use_id": "x"}]), "A tool_result block needs the tool_use block with its id"),
        (
            said("x", messages=[*TALK[:2], {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image"}]}]}]),
            "An image block needs source.",
        ),
        (said("x", stop_sequences=[""]), "stop_sequences must be without empty strings"),
        (said("x", stop_sequences=list("abcde")), "stop_sequences: List should have at most 4 items"),
        (said("x", temperature=3), "temperature"),
        (said("x", top_k=-2), "top_k"),
        (said("x", tools=[{"type": "web_search_20250305", "name": "web_search"}]), "this server runs no tools"),
        (said("x", tools=[{"name": "look"}]), "tools: a tool needs an input_schema."),
        (said("x", tools=[LOOK | {"name": ""}]), "tools: String should have at least 1 character."),
        (said("x", tool_choice={"type": "any"}), "tool_choice needs tools."),
        (said("x", tools=[LOOK], tool_choice={"type": "tool"}), 'tool_choice of type "tool" needs a name.'),
        (said("x", tools=[LOOK], tool_choice={"type": "tool", "name": "see"}), "not among the tools"),
        (said("x", mcp_servers=[{"url": "http://x"}]), "mcp_servers is not supported by this server; leave it out."),
        (said("x", vllm_xargs={"a": {}}), "vllm_xargs: "),
        (said("x", messages=[{"role": "assistant", "content": [USE | {"input": json.loads("[" * 128 + "]" * 128)}]}]), "valid dictionary"),
        (said("x", messages=[{"role": "assistant", "content": [
            USE | {"input": {"x": json.loads("[" * 128 + "]" * 128)}}]}]), "nested less than 128 deep"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(
    server: InProcessServer, body: dict[str, Any], message: str
) -> None:
    for more in ({}, {"stream": True}):
        how = {"content": json.dumps(body | more), "headers": {"Content-Type": "application/json"}}
        answer = server.request("POST", MESSAGES, **how)
        assert answer.status_code == 400, answer.text
        ErrorResponse.model_validate(answer.json())
        assert answer.json().keys() == {"type", "error"}
        said_so = answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error" and message in said_so and "\n" not in said_so


def error_of(answer: Any) -> tuple[int, str]:
    kind = answer.json()["error"]["type"]
    if kind != "request_too_large":  # is in Anthropic's documentation, and not in its client's types
        ErrorResponse.model_validate(answer.json())
    return answer.status_code, kind


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_every_kind_of_refusal_has_the_shape_that_clients_know(make_server: MakeServer, path: str) -> None:
    locked = make_server(api_key=("key",), max_request_bytes=2000, enable_auto_tool_choice=False)
    body, key = said("x"), {"x-api-key": "key"}
    assert locked.post(path, body, headers=key).status_code == 200
    assert locked.post(path, body, headers={"Authorization": "Bearer key"}).status_code == 200
    assert error_of(locked.post(path, body)) == (401, "authentication_error")
    assert error_of(locked.post(path, body, headers={"x-api-key": "other"})) == (401, "authentication_error")
    assert error_of(locked.post(path, body | {"model": "other"}, headers=key)) == (404, "not_found_error")
    assert error_of(locked.post(f"{path}/nowhere", body, headers=key)) == (404, "not_found_error")
    assert error_of(locked.request("GET", path, headers=key)) == (405, "invalid_request_error")
    assert error_of(locked.post(path, said("x" * 3000), headers=key)) == (413, "request_too_large")
    packed = key | {"Content-Encoding": "gzip"}
    assert error_of(locked.post(path, body, headers=packed)) == (415, "invalid_request_error")
    assert error_of(locked.request("POST", path, content=b"{", headers=key)) == (400, "invalid_request_error")
    assert error_of(locked.post(path, body | {"tools": [LOOK]}, headers=key)) == (400, "invalid_request_error")
    locked.app.state.gate.draining = True
    assert error_of(locked.post(path, body, headers=key)) == (503, "overloaded_error")


def test_a_defect_of_the_server_reveals_nothing(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(AnthropicMessagesRequest, "as_chat", fail)
    answer = make_server().post(MESSAGES, said("x"))
    assert error_of(answer) == (500, "api_error") and "secret" not in answer.text


class FailingEcho(RecordingEcho):
    """Fails after three steps, with `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error, self._ticks = error, 0

    async def get_output_async(self) -> Any:
        self._ticks += 1
        if self._ticks > 3:
            raise self._error
        return await super().get_output_async()


def test_an_error_in_a_stream_is_its_last_event(make_server: MakeServer) -> None:
    dying = make_server(FailingEcho(EngineDeadError("The engine process ended.")))
    *events, last, rest = dying.post(MESSAGES, said("x", max_tokens=20, stream=True)).text.split("\n\n")
    name, data = last.split("\n")
    assert (name, rest) == ("event: error", "") and events[0].startswith("event: message_start\n")
    error = ErrorResponse.model_validate(json.loads(data.removeprefix("data: ")))
    assert error.error.type == "overloaded_error"
    assert error_of(dying.post(MESSAGES, said("x"))) == (503, "overloaded_error")


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "client": None, "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "server": ("test", 80), "root_path": "",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_server_cuts_an_answer_with_an_error(make_server: MakeServer, stream: bool) -> None:
    server = make_server(RecordingEcho(tick_seconds=3600))
    sent: list[dict[str, Any]] = []
    asked = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not asked.is_set():
            asked.set()
            return {"type": "http.request", "body": json.dumps(said("x", stream=stream)).encode(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        running = asyncio.create_task(server.app(scope_of(MESSAGES), receive, send))
        while not server.client.added or (stream and not sent):  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        server.app.state.gate.expire()
        await running

    server.run(run())
    body = b"".join(message.get("body", b"") for message in sent).decode()
    assert sent[0]["status"] == (200 if stream else 503) and not sent[-1].get("more_body")
    if stream:
        assert body.startswith("event: error\ndata: ") and body.endswith("\n\n") and body.count("data: ") == 1
    error = json.loads(body.partition("data: ")[2] if stream else body)
    assert ErrorResponse.model_validate(error).error.type == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_an_error(make_server: MakeServer, stream: bool) -> None:
    server = make_server(RecordingEcho(tick_seconds=3600), server_dev_mode=True)

    async def both() -> Any:
        waiting = asyncio.create_task(
            server.send("POST", MESSAGES, json=said("x", stream=stream), headers={"X-Request-Id": "me"})
        )
        while not server.client.added:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await server.send("POST", "/abort_requests", json={"request_ids": ["msg_me"]})
        return await waiting

    answer = server.run(both())
    assert "The request was aborted." in answer.text and '"overloaded_error"' in answer.text
    assert answer.status_code == (200 if stream else 503) and server.engine.num_unfinished_requests == 0


def test_what_changes_nothing_is_accepted(server: InProcessServer) -> None:
    neutral = {
        "metadata": {"user_id": "x"}, "service_tier": "auto", "mcp_servers": [], "temperature": 1.0, "top_p": 1.0, "top_k": 5,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "mm_payload": "none", "system": "", "tools": [],
        "tool_choice": {"type": "auto"}, "cache_salt": "x", "context_management": {"edits": []}, "unheard_of": 1, "output_config": {"effort": "low"},
    }  # fmt: skip
    plain = ask(server, said("</think>Hello"))
    assert without_ids(ask(server, said("</think>Hello") | neutral)) == without_ids(plain)


def test_a_model_that_cannot_write_has_no_messages(make_server: MakeServer) -> None:
    server = make_server(config=replace(byte_config(), pooling_config=PoolingConfig(runner_type="pooling")))
    for path in (MESSAGES, COUNT):
        assert error_of(server.post(path, said("x"))) == (404, "not_found_error")
