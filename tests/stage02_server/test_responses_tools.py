"""Tools and reasoning in /v1/responses. The echo engine says what it was told, so an input that holds a call makes an answer
with one; and a chat that says the same things must have the same prompt and the same answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from server_under_test import InProcessServer, RecordingEcho, byte_config

from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stagetrace import trace

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = "message.output_text.logprobs"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "enum": ["sun", "moon"]}}, "required": ["at"]}
LOOK = {"name": "look", "description": "See.", "parameters": PARAMETERS, "strict": True}
TOOLS: list[dict[str, Any]] = [{"type": "function"} | LOOK, {"type": "function", "name": "wait"}]
CHAT_TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "wait"}}]
NAMED = {"type": "function", "name": "look"}
TEMPLATE = "{{ messages | tojson }}{{ tools | tojson }}{{ reasoning_effort }}{{ thinking }}"


class RememberingEcho(RecordingEcho):
    """Knows the last prompt, and what the last answer had to match."""

    def __init__(self) -> None:
        super().__init__(config=byte_config(8192))
        self.prompt: list[int] = []
        self.wanted: StructuredOutputsParams | None = None

    async def add_request_async(self, request: Any) -> None:
        self.prompt = request.prompt_token_ids
        self.wanted = request.sampling_params.structured_outputs
        await super().add_request_async(request)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    server = InProcessServer(
        RememberingEcho(), byte_config(8192), enable_auto_tool_choice=True, tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )  # fmt: skip
    yield server
    server.close()


@pytest.fixture(scope="module")
def templated() -> Iterator[InProcessServer]:
    """Its prompts show all that a template is told."""
    server = InProcessServer(RememberingEcho(), byte_config(8192), chat_template=TEMPLATE)
    yield server
    server.close()


def echo_of(server: InProcessServer) -> RememberingEcho:
    assert isinstance(server.client, RememberingEcho)
    return server.client


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def told_by(text: str) -> list[dict[str, Any]]:
    """The output that the events of a stream amount to; they must come in OpenAI's order and agree with each other."""
    output: list[dict[str, Any]] = []
    waiting_for: list[str] = []
    for block in text.split("\n\n")[:-1]:
        event = json.loads(block.split("\n")[1].removeprefix("data: "))
        STREAM_EVENT.validate_python(event)
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not waiting_for and event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
            item_id, told = event["item"]["id"], ""
            waiting_for = {
                "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
                "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
                "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
            }[event["item"]["type"]] + ["output_item.done"]
        elif "output_index" in event:
            assert event["output_index"] == len(output) - 1 and event.get("item_id", item_id) == item_id
            if waiting_for[0].endswith(".delta") and waiting_for[0] != kind:
                waiting_for.pop(0)
            assert waiting_for[0] == kind
            told += event.get("delta", "")
            if kind.endswith(("text.done", "arguments.done")):
                assert (event["text"] if "text" in event else event["arguments"]) == told
            if not kind.endswith(".delta"):
                waiting_for.pop(0)
            if kind == "output_item.done":
                assert event["item"]["id"] == item_id
                output[-1] = event["item"]
        elif kind in ("completed", "incomplete"):
            assert not waiting_for and event["response"]["output"] == output
    return output


def ask(server: InProcessServer, text: str, **fields: Any) -> dict[str, Any]:
    """The response to `text`, which a stream gives too."""
    body = {"input": text, "max_output_tokens": len(text.encode()), **fields}
    answer = server.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    streamed = told_by(server.post(RESPONSES, body | {"stream": True}).text)
    assert without_ids(streamed) == without_ids(answer.json()["output"])
    return answer.json()


fragments = st.sampled_from(
    [CALL, "<think>", "</think>", "Hm. ", "\n", "é", "<tool_call>", "</tool_call>", "<", '{"name": "']
)


@given(text=st.lists(fragments, min_size=1, max_size=8).map("".join).filter(str.strip), interval=st.integers(1, 9))
def test_an_answer_has_the_parts_that_a_chat_has(server: InProcessServer, text: str, interval: int) -> None:
    answer = ask(server, text, tools=TOOLS, stream_interval=interval)
    body = {"messages": [{"role": "user", "content": text}], "tools": CHAT_TOOLS, "max_tokens": len(text.encode())}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for item in answer["output"]:
        if item["type"] == "function_call":
            found["calls"].append({"name": item["name"], "arguments": item["arguments"]})
        else:
            found["reasoning" if item["type"] == "reasoning" else "content"] += item["content"][0]["text"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert found == {"reasoning": message.get("reasoning", ""), "content": message["content"] or "", "calls": calls}
    assert [item["status"] for item in answer["output"]][-1] == "incomplete"
    assert all(item["status"] == "completed" for item in answer["output"][:-1])
    ids = [item["id"] for item in answer["output"]] + [item.get("call_id") for item in answer["output"]]
    assert len(set(ids) - {None}) == len(answer["output"]) + len(calls)


def test_items_come_in_the_order_in_which_they_were_written(server: InProcessServer) -> None:
    answer = ask(server, f"<think>Hm.</think>Yes. {CALL}\nAnd {CALL}", tools=TOOLS, stop=["<|"])
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    assert answer["output"][1]["content"][0]["text"] == "Yes. " and answer["output"][3]["content"][0]["text"] == "And "
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


def test_what_the_request_does_not_want(server: InProcessServer) -> None:
    text = f"Hm.</think>{CALL}{CALL}#"
    fields: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "include_reasoning": False, "stop": ["#"]}
    answer = ask(server, text, **fields)
    assert [item["type"] for item in answer["output"]] == ["function_call"] and answer["status"] == "completed"
    assert answer["parallel_tool_calls"] is False and answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    (item,) = ask(server, text, **fields, tool_choice="none")["output"]
    assert item["content"][0]["text"] == CALL + CALL


def test_what_was_asked_for_is_repeated(server: InProcessServer) -> None:
    asked: dict[str, Any] = {
        "tools": TOOLS, "tool_choice": NAMED, "max_tool_calls": 3, "reasoning": {"effort": "low", "summary": "auto"},
    }  # fmt: skip
    answer = ask(server, "Hello", **asked)
    missing = {"description": None, "parameters": None, "strict": None}
    assert {name: answer[name] for name in asked} == asked | {"tools": [TOOLS[0], missing | TOOLS[1]]}


FORCED: list[tuple[Any, Any]] = [
    (NAMED, CHAT_TOOLS[0]),
    ("required", "required"),
    ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, [CHAT_TOOLS[0]]),
    ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, None),
    ("auto", None),
    (None, None),
]


@pytest.mark.parametrize(("choice", "chat_choice"), FORCED, ids=str)
def test_a_forced_call_is_the_grammar_of_a_chat(server: InProcessServer, choice: Any, chat_choice: Any) -> None:
    ask(server, "Hello", tools=TOOLS, tool_choice=choice)
    wanted = echo_of(server).wanted
    tools = chat_choice if isinstance(chat_choice, list) else CHAT_TOOLS
    chat = {"messages": [{"role": "user", "content": "Hello"}], "tools": tools, "max_tokens": 2}
    server.post(CHAT, chat | {"tool_choice": "required" if isinstance(chat_choice, list) else chat_choice})
    assert wanted == echo_of(server).wanted and (wanted is None) == (chat_choice is None)


words = st.sampled_from(["a", "b c", "é"])
calls = st.lists(
    st.fixed_dictionaries({"name": words, "arguments": words.map(lambda text: json.dumps({"x": text}))}), max_size=2
)
turns = st.lists(st.tuples(st.none() | words, st.lists(words, max_size=2), calls, words), min_size=1, max_size=3)


@given(turns=turns, ask_again=words, choice=st.sampled_from(["none", None]), effort=st.sampled_from(["low", None]))
def test_items_become_the_prompt_of_a_chat(
    templated: InProcessServer, turns: list[Any], ask_again: str, choice: str | None, effort: str | None
) -> None:
    """(reasoning, texts, calls) of the assistant and the user's next words, told as items and as messages."""
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    ids = itertools.count()
    for reasoning, texts, made, words in turns:
        names = [f"call_{next(ids)}" for _ in made]
        message: dict[str, Any] = {"role": "assistant"}
        if reasoning is not None:
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}]})  # fmt: skip
            message["reasoning"] = reasoning
        for text in texts:
            items.append({"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": text}]})
            if "content" in message:  # who says two things takes two turns
                messages.append(message)
                message = {"role": "assistant"}
            message["content"] = text
        if made:
            message["tool_calls"] = [{"id": i, "type": "function", "function": call} for i, call in zip(names, made)]
        items += [{"type": "function_call", "call_id": i} | call for i, call in zip(names, made)]
        items += [{"type": "function_call_output", "call_id": i, "output": words} for i in names]
        messages += [message] if len(message) > 1 else []
        messages += [{"role": "tool", "tool_call_id": i, "content": words} for i in names]
        items.append({"role": "user", "content": [{"type": "input_text", "text": words}]})
        messages.append({"role": "user", "content": words})
    shared: dict[str, Any] = {"chat_template_kwargs": {"thinking": ask_again}, "tool_choice": choice}
    tools, chat_tools = (TOOLS, CHAT_TOOLS) if choice == "none" else ([], [])
    body = {"input": items, "max_output_tokens": 1, "tools": tools, "reasoning": {"effort": effort}} | shared
    answer = templated.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    prompt = echo_of(templated).prompt
    chat = {"messages": messages, "max_tokens": 1, "tools": chat_tools, "reasoning_effort": effort} | shared
    assert templated.post(CHAT, chat).status_code == 200
    assert prompt == echo_of(templated).prompt


def test_a_conversation_goes_on_across_calls(server: InProcessServer) -> None:
    """A stored response and its result amount to the same prompt as all items in `input`."""
    text = f"<think>Hm.</think>Yes. {CALL}{CALL}#"
    first = ask(server, text, tools=TOOLS, stop=["#"])
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
    made = [item["call_id"] for item in first["output"][2:]]
    results = [
        {"type": "function_call_output", "call_id": i, "output": [{"type": "input_text", "text": "!"}]} for i in made
    ]
    limit = {"max_output_tokens": 1}
    chained = server.post(RESPONSES, {"input": results, "previous_response_id": first["id"]} | limit)
    prompt = echo_of(server).prompt
    server.post(RESPONSES, {"input": [{"role": "user", "content": text}, *first["output"], *results]} | limit)
    assert chained.status_code == 200 and prompt == echo_of(server).prompt
    assert server.post("/detokenize", {"tokens": prompt}).json()["prompt"] == text + "Yes. !!"
    unknown = [results[0] | {"call_id": "call_of_nobody"}]
    refused = server.post(RESPONSES, {"input": unknown, "previous_response_id": first["id"]}).json()
    assert refused["error"]["param"] == "input" and "function_call" in refused["error"]["message"]


def test_logprobs_stay_with_the_message(server: InProcessServer) -> None:
    """Those of the reasoning before it too, as in vLLM; of calls they cannot be told."""
    text, fields = "Hm.</think>Yes", {"include": [LOGPROBS]}
    reasoning, message = ask(server, text, **fields)["output"]
    assert "logprobs" not in reasoning["content"][0]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == list(text)
    for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": NAMED}):
        error = server.post(RESPONSES, {"input": text} | fields | more).json()["error"]
        assert error["param"] == "include"
    uncalled = {"input": text, "tools": TOOLS, "tool_choice": "none", "max_output_tokens": 1} | fields
    assert server.post(RESPONSES, uncalled).status_code == 200


DEEP = json.loads("[" * 128 + "]" * 128)
BAD_FORM, BAD_REQUEST = "Bad Request", "BadRequestError"
A_CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *[({"tools": [{"type": t}]}, BAD_REQUEST, "tools") for t in ("web_search", "file_search", "mcp", "code_interpreter", "x")],
    ({"tools": [{"type": "function"}]}, BAD_REQUEST, "tools"),
    ({"tools": CHAT_TOOLS}, BAD_REQUEST, "tools"),
    ({"tools": [{"name": "f"}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "name": ""}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "name": "x" * 129}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": "\ud800"}}]}, BAD_FORM, "body.tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": float("nan")}}]}, BAD_REQUEST, "tools"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"a": DEEP}}]}, BAD_FORM, "body.tools"),
    ({"text": {"format": {"type": "json_schema", "name": "f", "schema": {"enum": DEEP}}}}, BAD_FORM, "body.text"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"$defs": 3}}], "tool_choice": "required"}, BAD_REQUEST, "tools"),
    ({"tools": [TOOLS[1]] * 129}, BAD_FORM, "body.tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, BAD_FORM, "body.tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED | {"name": "x"}}, BAD_REQUEST, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, BAD_REQUEST, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp", "server_label": "x"}}, BAD_REQUEST, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, BAD_REQUEST, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, BAD_REQUEST, "tool_choice"),
    ({"tool_choice": "required"}, BAD_REQUEST, "tool_choice"),
    ({"max_tool_calls": 0}, BAD_FORM, "body.max_tool_calls"),
    ({"reasoning": {"effort": "huge"}}, BAD_FORM, "body.reasoning"),
    ({"reasoning": {"summary": "detailed"}}, BAD_REQUEST, "reasoning.summary"),
    ({"chat_template_kwargs": {"messages": []}}, BAD_REQUEST, "chat_template_kwargs"),
    ({"input": [A_CALL | {"call_id": None}]}, BAD_REQUEST, "input"),
    ({"input": [A_CALL | {"arguments": "{"}]}, BAD_REQUEST, "input"),
    ({"input": [A_CALL, {"type": "function_call_output", "call_id": "2", "output": "x"}]}, BAD_REQUEST, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}, A_CALL]}, BAD_REQUEST, "input"),
    ({"input": [A_CALL, {"type": "function_call_output", "call_id": "1"}]}, BAD_REQUEST, "input"),
    ({"input": [A_CALL, {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]}, BAD_REQUEST, "input"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, BAD_REQUEST, "input"),
    ({"input": [{"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]}]}, BAD_REQUEST, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, BAD_REQUEST, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, BAD_REQUEST, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "type", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused(server: InProcessServer, fields: dict[str, Any], type: str, param: str) -> None:
    for stream in (False, True):
        content = json.dumps({"input": "Hello", "stream": stream} | fields)
        answer = server.request("POST", RESPONSES, content=content, headers={"Content-Type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, type, param), error
        assert "response_format" not in error["message"]


def test_auto_needs_the_flags(make_server: Any) -> None:
    server = make_server()
    body = {"input": "Hi", "tools": TOOLS, "max_output_tokens": 2}
    assert server.post(RESPONSES, body).json()["error"]["param"] == "tool_choice"
    for choice in ("none", "required", NAMED):
        assert server.post(RESPONSES, body | {"tool_choice": choice}).status_code == 200


def test_the_trace_tells_what_was_found(server: InProcessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(trace, "on", True)
    monkeypatch.setattr(trace, "emit", lambda name, **args: found.append(args) if name == "answer.parsed" else None)
    text = f"Hm.</think>{CALL}{CALL}#"
    server.post(RESPONSES, {"input": text, "tools": TOOLS, "stop": "#"})
    assert [(one["reasoning_characters"], one["tool_calls"]) for one in found] == [(3, 2)]


class look(BaseModel):  # the name of the function
    at: str


def test_openai_client(server: InProcessServer) -> None:
    async def session() -> None:
        transport = httpx.ASGITransport(server.app)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            how: Any = {
                "model": "byte-model",
                "tools": [openai.pydantic_function_tool(look)],
                "extra_body": {"stop": "#"},
            }
            how["tools"] = [{"type": "function"} | how["tools"][0]["function"]]
            asked: Any = [{"role": "user", "content": f"Hm.</think>Yes. {CALL}#"}]
            whole = await client.responses.parse(input=asked, **how)
            call = whole.output[-1]
            assert call.type == "function_call" and whole.output_text == "Yes. "
            asked += [item.to_dict() for item in whole.output]
            asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "bright"})
            assert (await client.responses.create(input=asked, **how)).status == "completed"
            async with client.responses.stream(input=asked[:1], **how) as stream:
                deltas = [
                    event.delta async for event in stream if event.type == "response.function_call_arguments.delta"
                ]
                last = (await stream.get_final_response()).output[-1]
            assert last.type == "function_call" and "".join(deltas) == last.arguments == call.arguments == '{"at": "é"}'

    server.run(session())
