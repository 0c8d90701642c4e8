"""/v1/responses: what goes in, what comes out, the order of its events, and what OpenAI's own types say about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_under_test import MAX_MODEL_LEN, InProcessServer, RecordingEcho

RESPONSES = "/v1/responses"
MakeServer = Callable[..., InProcessServer]
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
BAD_FORM, BAD_REQUEST = "Bad Request", "BadRequestError"
words = st.text(alphabet="abc é✓", min_size=1, max_size=6).filter(str.strip)
short = st.text(alphabet="ab é✓", min_size=1, max_size=2)  # four of them fill less than half of the context


def text_of(body: dict[str, Any]) -> str:
    (item,) = body["output"]
    (part,) = item["content"]
    return part["text"]


def ask(server: InProcessServer, input: Any, **body: Any) -> dict[str, Any]:
    answer = server.post(RESPONSES, {"input": input, "max_output_tokens": 4} | body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events, each of which names its type twice, is one of OpenAI's, and has the next number."""
    *blocks, rest = text.split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        STREAM_EVENT.validate_python(event)
        found.append(event)
    assert rest == ""
    return found


def prompt_of(server: InProcessServer, input: Any, **body: Any) -> str:
    """The echo engine answers with its prompt, and begins again when it is through: the usage says where."""
    answer = ask(server, input, max_output_tokens=None, **body)
    return text_of(answer).encode()[: answer["usage"]["input_tokens"]].decode()


@given(input=words, limit=st.integers(1, 20), logprobs=st.booleans())
def test_stream_and_whole_answer_say_the_same(server: InProcessServer, input: str, limit: int, logprobs: bool) -> None:
    body = {"max_output_tokens": limit} | (LOGPROBS if logprobs else {})
    whole = ask(server, input, **body)
    events = events_of(server.post(RESPONSES, {"input": input, "stream": True} | body).text)
    types = [event["type"].removeprefix("response.") for event in events]
    deltas = types.count("output_text.delta")
    assert types == [
        *["created", "in_progress", "output_item.added", "content_part.added"],
        *["output_text.delta"] * deltas,
        *["output_text.done", "content_part.done", "output_item.done", "incomplete"],
    ]
    last = events[-1]["response"]
    for field in ("id", "created_at"):
        last[field] = whole[field]
    last["output"][0]["id"] = whole["output"][0]["id"]
    assert last == whole
    assert "".join(event["delta"] for event in events[4 : 4 + deltas]) == text_of(whole) == events[4 + deltas]["text"]
    tokens = [entry["token"] for event in events[4 : 4 + deltas] for entry in event["logprobs"]]
    assert len(tokens) == (limit if logprobs else 0)
    assert tokens == [entry["token"] for entry in whole["output"][0]["content"][0]["logprobs"]]
    assert whole["usage"]["total_tokens"] == len(input.encode()) + limit


@given(turns=st.lists(short, min_size=2, max_size=3), instructions=st.none() | short)
def test_previous_response_continues_the_conversation(
    server: InProcessServer, turns: list[str], instructions: str | None
) -> None:
    """The same prompt as with all earlier messages in `input`; instructions are those of the last request only."""
    spoken: list[Any] = []
    previous = None
    for turn in turns[:-1]:
        answer = ask(server, turn, previous_response_id=previous, instructions="zz", max_output_tokens=1)
        spoken += [{"role": "user", "content": turn}, *answer["output"]]
        previous = answer["id"]
    last = {"role": "user", "content": [{"type": "input_text", "text": turns[-1]}]}
    chained = prompt_of(server, [last], previous_response_id=previous, instructions=instructions)
    assert chained == prompt_of(server, [*spoken, last], instructions=instructions)
    assert chained.startswith((instructions or "") + turns[0]) and chained.endswith(turns[-1])


def test_an_answer_that_ends_by_itself_is_complete(server: InProcessServer) -> None:
    (token,) = server.post("/tokenize", {"prompt": "l"}).json()["tokens"]
    for kind in ({"stop": "lo"}, {"stop_token_ids": [token]}):
        answer = ask(server, "Hello", max_output_tokens=8, **kind)
        assert (answer["status"], answer["output"][0]["status"]) == ("completed", "completed")
        assert answer["completed_at"] >= answer["created_at"] and answer["incomplete_details"] is None
    cut = ask(server, "Hello")
    assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_what_was_asked_for_is_repeated(server: InProcessServer) -> None:
    asked = {
        "instructions": "Be brief.", "max_output_tokens": 3, "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.75,
        "truncation": "auto", "user": "me", "text": {"format": {"type": "text"}}, "store": False,
    }  # fmt: skip
    answer = ask(server, "Hello", **asked)
    assert {name: answer[name] for name in asked} == asked
    assert answer["id"].startswith("resp_") and answer["model"] == "byte-model" and answer["object"] == "response"
    assert server.request("GET", f"{RESPONSES}/{answer['id']}").status_code == 404, "store=false"


def test_nobody_chooses_the_id(server: InProcessServer) -> None:
    answers = [
        server.post(RESPONSES, {"input": "Hello"}, headers={"X-Request-Id": "same"}).json()["id"] for _ in range(2)
    ]
    assert answers[0] != answers[1] and not any("same" in name for name in answers)


def test_truncation_auto_keeps_the_end(server: InProcessServer) -> None:
    long = "a" * MAX_MODEL_LEN + "bc"
    assert server.post(RESPONSES, {"input": long}).status_code == 400
    answer = ask(server, long, truncation="auto")
    assert answer["usage"]["input_tokens"] == MAX_MODEL_LEN - 1


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "unknown"}, 404, "NotFoundError", "model"),
    ({"input": ""}, 400, BAD_REQUEST, "input"),
    ({"input": []}, 400, BAD_REQUEST, "input"),
    ({"input": None}, 400, BAD_FORM, "body.input"),
    ({"input": 5}, 400, BAD_FORM, "body.input"),
    ({"input": ["Hello"]}, 400, BAD_FORM, "body.input"),
    ({"input": "\ud800"}, 400, BAD_FORM, "body.input"),
    ({"input": "x" * MAX_MODEL_LEN}, 400, BAD_REQUEST, "input"),
    ({"input": [{"content": "Hello"}]}, 400, BAD_REQUEST, "input"),
    ({"input": [{"role": "user"}]}, 400, BAD_REQUEST, "input"),
    ({"input": [{"role": "king", "content": "Hello"}]}, 400, BAD_FORM, "body.input"),
    ({"input": [{"role": "user", "content": ""}]}, 400, BAD_REQUEST, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, BAD_REQUEST, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, BAD_REQUEST, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, 400, BAD_REQUEST, "input"),
    ({"max_output_tokens": 0}, 400, BAD_REQUEST, "max_output_tokens"),
    ({"max_output_tokens": MAX_MODEL_LEN + 1}, 400, BAD_REQUEST, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, 400, BAD_FORM, "body.max_output_tokens"),
    ({"temperature": 2.1}, 400, BAD_REQUEST, "temperature"),
    ({"temperature": 1e999}, 400, BAD_FORM, "body.temperature"),
    ({"top_p": 0}, 400, BAD_REQUEST, "top_p"),
    ({"top_logprobs": 2}, 400, BAD_REQUEST, "top_logprobs"),
    (LOGPROBS | {"top_logprobs": 21}, 400, BAD_REQUEST, "top_logprobs"),
    (LOGPROBS | {"top_logprobs": -1}, 400, BAD_REQUEST, "top_logprobs"),
    ({"include": ["everything"]}, 400, BAD_FORM, "body.include"),
    ({"n": 2}, 400, BAD_REQUEST, "n"),
    ({"use_beam_search": True}, 400, BAD_REQUEST, "use_beam_search"),
    ({"prompt_logprobs": 1}, 400, BAD_REQUEST, "prompt_logprobs"),
    ({"return_prompt_text": True}, 400, BAD_REQUEST, "return_prompt_text"),
    ({"response_format": {"type": "json_object"}}, 400, BAD_REQUEST, "response_format"),
    ({"tools": [{"type": "web_search"}]}, 400, BAD_REQUEST, "tools"),
    ({"tool_choice": "required"}, 400, BAD_REQUEST, "tool_choice"),
    ({"prompt": {"id": "pmpt_1"}}, 400, BAD_REQUEST, "prompt"),
    ({"conversation": "conv_1"}, 400, BAD_REQUEST, "conversation"),
    ({"chat_template": "{{ 1 }}"}, 400, BAD_REQUEST, "chat_template"),
    ({"text": {"verbosity": "low"}}, 400, BAD_REQUEST, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, BAD_REQUEST, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, 400, BAD_FORM, "body.text"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, 400, BAD_REQUEST, "guided_regex"),
    ({"truncation": "middle"}, 400, BAD_FORM, "body.truncation"),
    ({"metadata": {str(i): "" for i in range(17)}}, 400, BAD_REQUEST, "metadata"),
    ({"metadata": {"x" * 65: ""}}, 400, BAD_REQUEST, "metadata"),
    ({"metadata": {"x": "x" * 513}}, 400, BAD_REQUEST, "metadata"),
    ({"metadata": {"x": 1}}, 400, BAD_FORM, "body.metadata"),
    ({"background": True, "store": False}, 400, BAD_REQUEST, "background"),
    ({"previous_response_id": "resp_unknown"}, 404, "NotFoundError", "previous_response_id"),
    ({"previous_response_id": "chatcmpl-1"}, 400, BAD_REQUEST, "previous_response_id"),
    ({"previous_response_id": ""}, 400, BAD_REQUEST, "previous_response_id"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "type", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals(
    server: InProcessServer, body: dict[str, Any], status: int, type: str, param: str, stream: bool
) -> None:
    content = json.dumps({"input": "Hello", "stream": stream} | body)
    answer = server.request("POST", RESPONSES, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (status, type, param, status), error
    assert "max_tokens" not in error["message"] and server.engine.num_unfinished_requests == 0


ACCEPTED: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 3},
    {"reasoning": {"effort": "high", "summary": None}, "include": ["reasoning.encrypted_content"]},
    {"reasoning": None, "text": None, "truncation": None, "metadata": None, "store": None, "background": None},
    {"service_tier": "flex", "safety_identifier": "me", "prompt_cache_key": "mine"},
    {"stream_options": {"include_obfuscation": False}, "stream": True},
    {"top_logprobs": None, "seed": 1, "top_k": 5, "cache_salt": "salt", "no_such_field": 1},
    {"input": [{"type": "message", "role": "system", "content": "a"}, {"role": "developer", "content": "b"}]},
]


@pytest.mark.parametrize("body", ACCEPTED, ids=lambda value: str(value)[:40])
def test_accepted(server: InProcessServer, body: dict[str, Any]) -> None:
    assert server.post(RESPONSES, {"input": "Hello"} | body).status_code == 200


def test_a_stream_without_text(server: InProcessServer) -> None:
    answer = server.post(RESPONSES, {"input": "a", "stop": "a", "stream": True})
    types = [event["type"] for event in events_of(answer.text)]
    assert "response.output_text.delta" not in types and types[-1] == "response.completed"


def test_a_failure_is_the_last_event(make_server: MakeServer) -> None:
    class Dying(RecordingEcho):
        async def get_output_async(self) -> Any:
            outputs = await super().get_output_async()
            if len(self.added) and outputs.outputs:
                raise RuntimeError("at /secret/path")
            return outputs

    server = make_server(Dying())
    answer = server.post(RESPONSES, {"input": "Hello", "stream": True})
    last = events_of(answer.text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error" and "/secret" not in answer.text


def test_openai_client(server: InProcessServer) -> None:
    async def session() -> None:
        transport = httpx.ASGITransport(server.app)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            whole = await client.responses.create(model="byte-model", input="Hello", max_output_tokens=7)
            assert whole.output_text == "HelloHe" and whole.usage and whole.usage.total_tokens == 12
            assert (await client.responses.retrieve(whole.id)).output_text == whole.output_text
            async with client.responses.stream(model="byte-model", input="Hello", max_output_tokens=7) as stream:
                deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert "".join(deltas) == "HelloHe" and len(deltas) > 1
            events = await client.responses.create(model="byte-model", input="Hello", stream=True)
            assert [event.type async for event in events][-1] == "response.incomplete"
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="unknown", input="Hello")

    server.run(session())
