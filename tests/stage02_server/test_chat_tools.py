"""Tools and reasoning over HTTP. The echo engine says what it was told, so a message that holds a call makes an answer with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, byte_config, events

from stage02_server.features.tools.answer_parser import AnswerDelta
from stage02_server.features.tools.reasoning_parsers import REASONING_PARSERS
from stage02_server.features.tools.tool_parsers import TOOL_PARSERS
from stage03_engine.errors import ConfigError
from stage03_engine.params.structured_outputs import StructuredOutputsParams

CHAT = "/v1/chat/completions"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "enum": ["sun", "moon"]}}, "required": ["at"]}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "See.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}


class RememberingEcho(RecordingEcho):
    def __init__(self) -> None:
        super().__init__(config=byte_config(1024))
        self.wanted: list[StructuredOutputsParams | None] = []
        self.skipped: list[bool] = []

    async def add_request_async(self, request: Any) -> None:
        self.wanted.append(request.sampling_params.structured_outputs)
        self.skipped.append(request.sampling_params.skip_special_tokens)
        await super().add_request_async(request)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer(
        RememberingEcho(), byte_config(1024), enable_auto_tool_choice=True, tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )  # fmt: skip
    yield server
    server.close()


def ask(server: InProcessServer, text: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """(message, finish_reason) of the echo of `text`, which a stream gives too."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": len(text.encode()), **fields}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    deltas = [c for e in events(server.post(CHAT, body | {"stream": True}).text) for c in e["choices"]]
    streamed: dict[str, Any] = {"role": deltas[0]["delta"]["role"]}
    for delta in deltas:
        assert delta["finish_reason"] is None or delta is deltas[-1]
        for key in ("content", "reasoning"):
            if key in delta["delta"]:
                streamed[key] = streamed.get(key, "") + delta["delta"][key]
        for call in delta["delta"].get("tool_calls", []):
            calls = streamed.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": call["function"]["name"], "arguments": ""},
                    }
                )
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    for calls in (message.get("tool_calls", []), streamed.get("tool_calls", [])):
        assert all(call.pop("id").startswith("chatcmpl-tool-") for call in calls)
    assert streamed == message | {"content": message["content"] or ""}
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    return message, choice["finish_reason"]


def test_reasoning_content_and_calls_are_told_apart(server: InProcessServer) -> None:
    message, reason = ask(server, f"<think>Hm.</think>Yes. {CALL}\n{CALL}", tools=TOOLS, max_tokens=200, stop=["<|"])
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    assert message["reasoning"] == "Hm." and message["content"].startswith("Yes. ")
    assert message["tool_calls"][:2] == [call, call] and reason == "length"


def test_an_answer_that_calls_ends_for_that_reason(server: InProcessServer) -> None:
    text = f"</think>{CALL}#"
    message, reason = ask(server, text, tools=TOOLS, stop=["#"], max_tokens=300)
    assert reason == "tool_calls" and message["content"] is None and "reasoning" not in message
    message, reason = ask(server, text, tools=TOOLS, stop=["#"], tool_choice="none")
    assert reason == "stop" and message["content"] == CALL and "tool_calls" not in message
    message, reason = ask(server, text, stop=["#"])
    assert reason == "stop" and message["content"] == CALL


def test_what_the_request_does_not_want(server: InProcessServer) -> None:
    message, _ = ask(
        server, f"Hm.</think>{CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False, include_reasoning=False
    )
    assert len(message["tool_calls"]) == 1 and "reasoning" not in message


def test_logprobs_of_text_that_is_held_back_are_all_there(server: InProcessServer) -> None:
    text = f"</think>{CALL}"
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": len(text.encode()),
        "tools": TOOLS,
        "logprobs": True,
    }
    stream = events(server.post(CHAT, body | {"stream": True}).text)
    tokens = [
        entry["token"] for e in stream for c in e["choices"] for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    whole = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert tokens == [entry["token"] for entry in whole] and len(tokens) == len(text.encode())


def items(*names: str) -> list[dict[str, Any]]:
    schemas = {"look": PARAMETERS, "wait": {"type": "object", "properties": {}}}
    return [
        {"type": "object", "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schemas[name]},
         "required": ["name", "parameters"]}
        for name in names
    ]  # fmt: skip


FORCED: list[tuple[dict[str, Any], Any]] = [
    ({"tool_choice": NAMED}, PARAMETERS),
    ({"tool_choice": "required"}, {"type": "array", "items": {"anyOf": items("look", "wait")}, "minItems": 1}),
    (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"type": "array", "items": {"anyOf": items("look", "wait")}, "minItems": 1, "maxItems": 1},
    ),
    ({"tool_choice": "auto"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("fields", "schema"), FORCED, ids=str)
def test_a_forced_call_is_a_grammar(server: InProcessServer, fields: dict[str, Any], schema: Any) -> None:
    assert isinstance(server.client, RememberingEcho)
    server.client.wanted.clear()
    ask(server, "Hello", tools=TOOLS, **fields)
    wanted = server.client.wanted[0]
    assert (wanted and json.loads(str(wanted.json))) == schema


def test_definitions_move_to_the_top(server: InProcessServer) -> None:
    assert isinstance(server.client, RememberingEcho)
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"]
    server.client.wanted.clear()
    ask(server, "Hello", tools=tools, tool_choice="required")
    wanted = server.client.wanted[0]
    assert wanted is not None and json.loads(str(wanted.json))["$defs"] == {"place": {"type": "string"}}
    tools[1]["function"]["parameters"] = schema | {"$defs": {"place": {"type": "integer"}}}
    response = server.post(
        CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    )
    assert response.json()["error"]["param"] == "tools"


def test_a_function_chosen_by_name_has_the_answer_for_its_arguments(server: InProcessServer) -> None:
    text = '{"at": "sun"}#'
    message, reason = ask(server, text, tools=TOOLS, tool_choice=NAMED, stop=["#"])
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "sun"}'}
    assert message["content"] is None and reason == "stop"  # as at OpenAI
    text = '[{"name": "look", "parameters": {"at": "sun"}}, {"name": "wait", "parameters": {}}]#'
    message, reason = ask(server, text, tools=TOOLS, tool_choice="required", stop=["#"], max_tokens=100)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "wait"] and reason == "tool_calls"


COUNT = {"type": "object", "properties": {"at": {"type": "string"}, "count": {"type": "integer"}}}
IN_FORMAT = {
    "llama3_json": '{"name": "look", "parameters": {"at": "é", "count": 3}};',
    "mistral": '[TOOL_CALLS]look{"at": "é", "count": 3}',
    "pythonic": "[look(at='é', count=3)]",
    "qwen3_xml": "<tool_call>\n<function=look>\n<parameter=at>\né\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", IN_FORMAT)
def test_every_format_over_http(name: str) -> None:
    """The same call, by each of the three APIs."""
    server = InProcessServer(RememberingEcho(), byte_config(1024), enable_auto_tool_choice=True, tool_call_parser=name)
    assert isinstance(server.client, RememberingEcho)
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": COUNT}}]
    text, wanted = f"So: {IN_FORMAT[name]} #", {"at": "é", "count": 3}
    most = len(text.encode())
    try:
        message, reason = ask(server, text, tools=tools, stop=["#"])
        assert reason == "tool_calls" and message["content"] == "So: "
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == wanted
        body: dict[str, Any] = {
            "input": text,
            "tools": [tools[0]["function"] | {"type": "function"}],
            "max_output_tokens": most,
        }
        assert json.loads(server.post("/v1/responses", body).json()["output"][1]["arguments"]) == wanted
        own = [{"name": "look", "input_schema": COUNT}]
        body = {
            "model": "byte-model",
            "messages": [{"role": "user", "content": text}],
            "tools": own,
            "max_tokens": most,
        }
        assert server.post("/v1/messages", body).json()["content"][1]["input"] == wanted
        # Mistral's tag is a special token, and Qwen's may be one
        assert set(server.client.skipped) == {name not in ("mistral", "qwen3_xml")}
        server.client.skipped.clear()
        ask(server, text, tools=tools, tool_choice="none")
        assert set(server.client.skipped) == {True}
    finally:
        server.close()


BAD_FORM, BAD_REQUEST = "Bad Request", "BadRequestError"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "x"}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"function": {"name": "x", "parameters": []}}]}, BAD_FORM, "body.tools"),
    ({"tools": [TOOLS[1]] * 129}, BAD_FORM, "body.tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, BAD_FORM, "body.tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, BAD_REQUEST, "tool_choice"),
    ({"tool_choice": "required"}, BAD_REQUEST, "tool_choice"),
    ({"tools": [], "tool_choice": NAMED}, BAD_REQUEST, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True, "stream": False}, BAD_REQUEST, "tool_choice"),
    ({"tools": [{"function": {"name": "x", "parameters": {"$defs": 3}}}], "tool_choice": "required"}, BAD_REQUEST, "tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, BAD_FORM, "body.messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, BAD_REQUEST, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}]}, BAD_REQUEST, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "type", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused(server: InProcessServer, fields: dict[str, Any], type: str, param: str) -> None:
    for stream in (False, True):
        response = server.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, type, param), error


def test_auto_needs_the_flags(make_server: Any) -> None:
    server = make_server()
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 2}
    for fields in ({}, {"tool_choice": "auto"}):
        assert server.post(CHAT, body | fields).json()["error"]["param"] == "tool_choice"
    for choice in ("none", "required", NAMED):
        assert server.post(CHAT, body | {"tool_choice": choice}).status_code == 200
    assert server.post(CHAT, {"messages": body["messages"], "tool_choice": "auto", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
        ({"tool_call_parser": "x"}, "hermes"),
        ({"reasoning_parser": "x"}, "deepseek_r1"),
        ({"tool_parser_plugin": "no/such.py"}, "--tool-parser-plugin"),
        ({"tool_parser_plugin": "no/such.txt"}, "--tool-parser-plugin"),
        ({"reasoning_parser_plugin": "/"}, "--reasoning-parser-plugin"),
    ],
)
def test_flags_that_cannot_be(make_server: Any, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        make_server(**args)
    assert "\n" not in str(error.value)


class Shouting:
    """A parser of a user's own: capital letters are the name of a function."""

    def feed(self, text: str, finished: bool) -> AnswerDelta:
        delta = AnswerDelta(content="".join(c for c in text if not c.isupper()))
        if finished:
            delta.add_call(0, "shout", "{}")
        return delta


def test_a_parser_of_ones_own(make_server: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from stage02_server.features.tools.tool_parsers import TOOL_PARSERS\n"
        "from stage02_server.features.tools.reasoning_parsers import REASONING_PARSERS\n"
        f"from {__name__} import Shouting\n"
        "TOOL_PARSERS['mine'] = Shouting\n"
        "REASONING_PARSERS['mine'] = REASONING_PARSERS['deepseek_r1']\n"
    )
    plugin = str(tmp_path / "mine.py")
    try:
        server = make_server(
            enable_auto_tool_choice=True, tool_call_parser="mine", tool_parser_plugin=plugin, reasoning_parser="mine",
            reasoning_parser_plugin=plugin,
        )  # fmt: skip
        message, _ = ask(server, "r</think>aB", tools=TOOLS)
    finally:
        del TOOL_PARSERS["mine"], REASONING_PARSERS["mine"]
    assert message["content"] == "a" and message["reasoning"] == "r"
    assert message["tool_calls"][0]["function"] == {"name": "shout", "arguments": "{}"}


def test_openai_client_with_a_real_model() -> None:
    """A model that has never seen a tool calls one, because nothing else can come."""
    process = ServerProcess(
        "gpt2-tiny", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--disable-any-whitespace"
    )
    try:
        with openai.OpenAI(base_url=f"{process.wait_until_ready()}/v1", api_key="none", max_retries=0) as client:
            fields: Any = {
                "model": "gpt2-tiny",
                "messages": [{"role": "user", "content": "Look!"}],
                "tools": TOOLS,
                "seed": 3,
            }
            for choice in (NAMED, "required"):
                ask: Any = fields | {"tool_choice": choice, "parallel_tool_calls": False}
                whole = client.chat.completions.create(**ask).choices[0]
                (call,) = whole.message.tool_calls or []
                assert call.type == "function"
                arguments = json.loads(call.function.arguments)
                assert arguments in ({"at": "sun"}, {"at": "moon"}, {}) and whole.message.content is None
                with client.chat.completions.stream(**ask) as stream:
                    stream.until_done()
                    (again,) = stream.get_final_completion().choices[0].message.tool_calls or []
                assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    finally:
        process.close()
