"""No body breaks /v1/responses, and what it answers is JSON of OpenAI's shape, whatever was asked for."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from hypothesis import given, strategies as st
from openai.types.responses import Response
from server_under_test import InProcessServer

RESPONSES = "/v1/responses"
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["\ud800", 2**63, 10**30, "resp_", "text", "user", "message"])
)  # fmt: skip
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
fields = st.sampled_from(
    ["input", "instructions", "previous_response_id", "store", "background", "max_output_tokens", "include", "top_logprobs",
     "text", "truncation", "metadata", "service_tier", "stream", "stream_options", "tools", "tool_choice", "reasoning", "prompt",
     "temperature", "top_p", "stop", "seed", "logit_bias", "user", "cache_salt", "priority", "structured_outputs",
     "parallel_tool_calls", "max_tool_calls", "conversation", "n", "model", "vllm_xargs", "include_reasoning",
     "chat_template_kwargs"]
)  # fmt: skip
items = st.lists(
    st.fixed_dictionaries(
        {}, optional={
            "type": st.just("message") | scalars, "role": st.sampled_from(["user", "developer"]) | scalars,
            "content": st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": scalars})) | scalars,
        },
    )
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["function_call", "function_call_output", "reasoning"])}, optional={
            "call_id": st.just("1") | scalars, "name": scalars, "arguments": st.just("{}") | scalars, "output": anything,
            "summary": anything, "content": anything,
        },
    ),
    max_size=3,
)  # fmt: skip
formats = st.fixed_dictionaries(
    {"format": st.fixed_dictionaries({"type": st.just("json_schema"), "name": st.just("x"), "schema": anything})}
)
tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function") | scalars, "name": st.sampled_from(["f", "g"]) | scalars},
        optional={"parameters": st.dictionaries(st.sampled_from(["type", "properties"]), anything), "strict": scalars},
    ),
    max_size=2,
)
choices = st.sampled_from(["none", "required", {"type": "function", "name": "f"}]) | anything
bodies = st.builds(
    lambda wild, tame: {"input": "Hello"} | wild | tame,
    st.dictionaries(fields, anything, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "input": items,
            "text": formats,
            "stream": st.booleans(),
            "tools": tools,
            "tool_choice": choices,
        },
    ),
)


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def send(server: InProcessServer, body: Any) -> tuple[int, str]:
    answer = server.request(
        "POST", RESPONSES, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    return answer.status_code, answer.text


def check_answer(text: str) -> None:
    blocks = text.split("\n\n")[:-1] if text.startswith("event: ") else ["\ndata: " + text]
    for number, block in enumerate(blocks):
        event = strictly(block.split("\n")[1].removeprefix("data: "))
        assert event.get("sequence_number", number) == number
    Response.model_validate(event.get("response", event))


@given(body=bodies)
def test_no_body_breaks_the_server(server: InProcessServer, body: dict[str, Any]) -> None:
    status, text = send(server, body)
    assert status in (200, 400, 404), text
    if status == 200:
        check_answer(text)
    else:
        assert strictly(text)["error"]["code"] == status
    status, text = send(server, {"input": "next", "max_output_tokens": 2})
    assert status == 200 and '"text":"ne"' in text


def test_a_schema_with_an_infinite_number(server: InProcessServer) -> None:
    for stream in (False, True):
        for number in (float("nan"), float("inf")):
            schema = {"type": "number", "minimum": number}
            format = {"type": "json_schema", "name": "x", "schema": schema}
            status, text = send(server, {"input": "Hello", "stream": stream, "text": {"format": format}})
            assert status == 400 and strictly(text)["error"]["param"] in ("text", "text.format")
