"""/v1/responses with the real engine: the tokens are those of the other endpoints, and structured output holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from server_under_test import ServerProcess


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    server = ServerProcess(
        "gpt2-tiny",
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "50000000",
        "--disable-any-whitespace",
        "--enable-prompt-tokens-details",
    )
    try:
        url = server.wait_until_ready()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.close()


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.9, "extra_body": {"seed": 7}}])
def test_the_same_text_as_a_chat(client: openai.OpenAI, settings: dict) -> None:
    spoken = [{"role": "system", "content": "First Citizen:\n"}, {"role": "user", "content": "Speak, speak."}]
    chat = client.chat.completions.create(model="gpt2-tiny", messages=spoken, max_tokens=12, **settings)  # type: ignore[call-overload]
    response = client.responses.create(
        model="gpt2-tiny",
        instructions=spoken[0]["content"],
        input=spoken[1]["content"],
        max_output_tokens=12,
        **settings,
    )
    assert response.output_text == chat.choices[0].message.content
    with client.responses.stream(
        model="gpt2-tiny",
        input=spoken,
        max_output_tokens=12,
        **settings,  # type: ignore[arg-type]
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text and len(deltas) > 3


def test_a_conversation_finds_its_beginning_in_the_prefix_cache(client: openai.OpenAI) -> None:
    first = client.responses.create(model="gpt2-tiny", input="To be, or not to be, " * 8, max_output_tokens=8)
    second = client.responses.create(
        model="gpt2-tiny", input="Why?", previous_response_id=first.id, max_output_tokens=2
    )
    assert first.usage and second.usage
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= 16


class Play(pydantic.BaseModel):
    """What a small model can write in a few tokens."""

    act: bool


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="gpt2-tiny", input="JSON:", text_format=Play, max_output_tokens=200, temperature=0
    )
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Play)


PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "enum": ["sun", "moon"]}}, "required": ["at"]}
FUNCTION = {"name": "look", "parameters": PARAMETERS}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_the_call_that_a_chat_makes(client: openai.OpenAI, choice: str | dict) -> None:
    settings: Any = {"model": "gpt2-tiny", "temperature": 0, "parallel_tool_calls": False}
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": "look"}}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Look!"}],
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice=forced,
        **settings,
    )
    (wanted,) = chat.choices[0].message.tool_calls or []
    asked: Any = {"input": "Look!", "tools": [{"type": "function"} | FUNCTION], "tool_choice": choice} | settings
    first = client.responses.create(**asked)
    (call,) = first.output
    assert call.type == "function_call" and wanted.type == "function" and first.status == "completed"
    assert (call.name, call.arguments) == (wanted.function.name, wanted.function.arguments)
    assert json.loads(call.arguments)["at"] in ("sun", "moon")
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 3
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "bright"}
    later = client.responses.create(
        model="gpt2-tiny", input=[result], previous_response_id=first.id, max_output_tokens=2
    )
    assert later.output_text and later.previous_response_id == first.id


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_a_400(client: openai.OpenAI, stream: bool) -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "(?<=a)b"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="gpt2-tiny", input="JSON:", text={"format": format}, stream=stream)  # type: ignore[call-overload]
    assert refused.value.param == "text.format"


def test_a_grammar_that_does_not_compile_fails_in_the_background(client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "(?<=a)b"}}
    events = client.responses.create(
        model="gpt2-tiny",
        input="JSON:",
        text={"format": format},
        background=True,
        stream=True,  # type: ignore[arg-type]
    )
    last = list(events)[-1]
    assert last.type == "response.failed" and last.response.error and last.response.error.code == "invalid_prompt"


def test_cancel_frees_the_engine(client: openai.OpenAI) -> None:
    body = {"ignore_eos": True}
    response = client.responses.create(model="gpt2-tiny", input="To be", background=True, extra_body=body)
    assert client.responses.cancel(response.id).status == "cancelled"
    metrics = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
    assert "request_success_total" in metrics
    again = client.responses.create(model="gpt2-tiny", input="To be", max_output_tokens=1)
    assert again.status == "incomplete"
