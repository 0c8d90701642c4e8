"""Structured output over HTTP: which fields ask for it, what is refused with which words, and when the status is decided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from patience import PATIENCE
from server_under_test import InProcessServer, RecordingEcho, ServerProcess, events
from standstill import LONGEST, Standstill

from stage03_engine.params.structured_outputs import StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["answer"],
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
BAD_FORM, BAD_REQUEST = "Bad Request", "BadRequestError"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


TAG = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    # fields, type, param, a word of the message
    ({"response_format": "json"}, BAD_FORM, "body.response_format", "dictionary"),
    ({"response_format": {}}, BAD_REQUEST, "response_format", "json_schema"),
    ({"response_format": {"type": "xml"}}, BAD_REQUEST, "response_format", "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, BAD_REQUEST, "response_format", "needs format, or structures and triggers"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, BAD_REQUEST, "response_format", "triggers"),
    ({"structured_outputs": {"structural_tag": "[3]"}}, BAD_REQUEST, "structured_outputs", "needs format"),
    ({"response_format": {"type": "json_schema"}}, BAD_REQUEST, "response_format", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, BAD_REQUEST, "response_format", "schema"),
    ({"structured_outputs": "a"}, BAD_FORM, "body.structured_outputs", "dictionary"),
    ({"structured_outputs": {}}, BAD_REQUEST, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, BAD_REQUEST, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"structural_tag": "a"}}, BAD_REQUEST, "structured_outputs", "JSON"),
    ({"structured_outputs": {"regex": 3}}, BAD_REQUEST, "structured_outputs", "regex"),
    ({"structured_outputs": {"choice": "yes"}}, BAD_REQUEST, "structured_outputs", "choice"),
    ({"structured_outputs": {"json": False}}, BAD_REQUEST, "structured_outputs", "false"),
    ({"guided_json": "{"}, BAD_REQUEST, "guided_json", "JSON"),
    ({"guided_json": 3}, BAD_FORM, "body.guided_json", "guided_json"),
    ({"guided_regex": "a" * 70_000}, BAD_REQUEST, "guided_regex", "65536"),
    ({"guided_choice": ["a" * 100] * 1000}, BAD_REQUEST, "guided_choice", "65536"),
    ({"guided_json": {"title": "a" * 70_000}}, BAD_REQUEST, "guided_json", "65536"),
    ({"guided_grammar": "\n" * 65_000}, BAD_REQUEST, "guided_grammar", "root"),
    ({"guided_json": {"\ud800": 1}}, BAD_REQUEST, "guided_json", "Unicode"),
    ({"guided_json": {"type": "string", "\ud800": 1}}, BAD_REQUEST, "guided_json", "Unicode"),
    ({"guided_regex": ["a"]}, BAD_FORM, "body.guided_regex", "string"),
    ({"guided_regex": "\ud800"}, BAD_FORM, "body.guided_regex", "unicode"),
    ({"guided_choice": []}, BAD_REQUEST, "guided_choice", "at least one"),
    ({"guided_choice": [""]}, BAD_REQUEST, "guided_choice", "empty"),
    ({"guided_choice": [3]}, BAD_FORM, "body.guided_choice", "string"),
    ({"guided_grammar": "x ::= 3"}, BAD_REQUEST, "guided_grammar", "root"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, BAD_REQUEST, "guided_choice", "guided_regex and guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, BAD_REQUEST, "guided_regex", "response_format and guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, BAD_REQUEST, "guided_regex", "only one"),
]  # fmt: skip
TAKEN: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
    ({"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, ("regex", "a+")),
    ({"response_format": {"type": "json_object"}}, ("json_object", "")),
    ({"response_format": BY_SCHEMA}, ("json", json.dumps(SCHEMA, separators=(",", ":")))),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, ("json", json.dumps(SCHEMA, separators=(",", ":")))),
    ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
    ({"response_format": TAG}, ("structural_tag", json.dumps(TAG, separators=(",", ":")))),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        ("structural_tag", json.dumps(TAG, separators=(",", ":"))),
    ),
    ({"guided_json": json.dumps(SCHEMA)}, ("json", json.dumps(SCHEMA, separators=(",", ":")))),
    ({"guided_json": True}, ("json", "true")),
    ({"guided_choice": ["yes", "é"]}, ("choice", '["yes", "é"]')),
    ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
]
PATHS = [(COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": [{"role": "user", "content": "Hello"}]})]


class RememberingEcho(RecordingEcho):
    """The echo engine with a memory of what every answer was to match."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[StructuredOutputsParams | None] = []

    async def add_request_async(self, request: Any) -> None:
        self.wanted.append(request.sampling_params.structured_outputs)
        await super().add_request_async(request)


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    server = InProcessServer(RememberingEcho())
    yield server
    server.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "type", "param", "word"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_refused(
    echo: InProcessServer, fields: dict[str, Any], type: str, param: str, word: str, stream: bool
) -> None:
    for path, body in PATHS:
        content, headers = json.dumps(body | {"stream": stream} | fields), {"Content-Type": "application/json"}
        response = echo.request("POST", path, content=content, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, type, param), error
        assert word in error["message"] and len(error["message"]) < 250


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "key"), TAKEN, ids=str)
def test_what_reaches_the_engine(
    echo: InProcessServer, fields: dict[str, Any], key: tuple[str, str] | None, stream: bool
) -> None:
    assert isinstance(echo.client, RememberingEcho)
    for path, body in PATHS:
        echo.client.wanted.clear()
        response = echo.post(path, body | {"stream": stream, "n": 2, "max_tokens": 5} | fields)
        assert response.status_code == 200, response.text
        assert [wanted and wanted.key for wanted in echo.client.wanted] == [key, key]
        if stream:  # the output that was waited for is not lost
            pieces = [choice for event in events(response.text) for choice in event["choices"]]
            texts = [
                piece.get("text") or piece.get("delta", {}).get("content") or ""
                for piece in pieces
                if piece["index"] == 1
            ]
            assert "".join(texts) == "Hello"


def test_the_settings_of_all_answers_together_are_bounded() -> None:
    """The engine gets a grammar, or bad words, once per answer: 100 kB could become a gigabyte."""
    server = InProcessServer(RememberingEcho(), max_settings_bytes=2000)
    long: dict[str, Any] = {"guided_regex": "a" * 1500, "max_tokens": 2}
    words = {"bad_words": [f"{number} words" for number in range(100)], "max_tokens": 2}
    try:
        for path, body in PATHS:
            assert server.post(path, body | long).status_code == 200
            for fields in (long, words):
                response = server.post(path, body | fields | {"n": 2})
                assert response.status_code == 400, response.text
                assert (
                    response.json()["error"]["param"] == "n"
                    and "--max-settings-bytes" in response.json()["error"]["message"]
                )
        error = server.post(COMPLETIONS, long | {"prompt": ["a", "b"], "stream": True}).json()["error"]
        assert error["param"] == "prompt" and "2000" in error["message"]
        assert server.post(COMPLETIONS, {"prompt": ["a"] * 20, "max_tokens": 2}).status_code == 200
        assert isinstance(server.client, RememberingEcho) and len(server.client.wanted) == 22
    finally:
        server.close()


@pytest.mark.long
def test_the_standstill_that_a_grammar_can_cause_is_short() -> None:
    prompt = {"prompt": "ROMEO:", "max_tokens": 2}
    attacks: list[dict[str, Any]] = [
        {"guided_grammar": "\n" * 65_000}, {"guided_grammar": "\n" * 40_000 + 'root ::= "a"'}, {"guided_regex": "[aŁӀ]" * 13_000},
        {"guided_regex": "[" * 65_000}, {"guided_regex": "a?" * 30_000}, {"guided_choice": ["a"] * 65_536}, {"guided_choice": ["a" * 100] * 65_000},
        {"guided_json": nested(900)}, {"guided_json": "[" * 65_000}, {"guided_json": {"enum": [f"v{i}" for i in range(6000)]}},
        {"guided_json": {"enum": ["v" * 100] * 65_000}}, {"guided_json": {"type": "string", "pattern": "[" * 64_000}},
        {"guided_json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(300)]}},
        {"stop": ["ab" * 511 + end for end in "cdef"], "max_tokens": 400}, {"bad_words": [f"{i} efgh " * 9 for i in range(256)]},
        {"n": 128, "temperature": 1, "guided_choice": [f"a{i}" for i in range(7000)]},
        {"prompt": ["a"] * 4096, "guided_regex": "(a|" + "b" * 64_000 + ")"},
    ]  # fmt: skip
    server = ServerProcess("gpt2-tiny", "--port", "0", "--kv-cache-memory-bytes", "50000000")
    waits: list[tuple[str, float]] = []
    try:
        with httpx.Client(base_url=server.wait_until_ready(), timeout=PATIENCE) as client:
            for fields in attacks:
                content = json.dumps(prompt | fields).encode()
                with Standstill(server.url) as standstill:
                    answer = client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 400), answer.text
                waits.append((str(fields)[:60], standstill.seconds))
    finally:
        server.close()
    print(*waits, sep="\n")
    assert all(seconds < LONGEST for _, seconds in waits), waits


def test_a_key_with_many_grammars_waiting_is_asked_to_come_again_and_no_other() -> None:
    """Streamed or not; requests for the same grammar count once."""
    bombs = [{"type": "integer", "multipleOf": 323456789 + 2 * i} for i in range(2)]
    limits = ["--max-waiting-grammars", "1", "--grammar-compile-seconds", "3"]
    server = ServerProcess(
        "gpt2-tiny", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--api-key", "A", "B", *limits
    )
    a, b = {"Authorization": "Bearer A"}, {"Authorization": "Bearer B"}
    try:
        with (
            httpx.Client(base_url=server.wait_until_ready(), timeout=PATIENCE) as client,
            ThreadPoolExecutor(2) as pool,
        ):

            def ask(who: dict[str, str], **fields: Any) -> httpx.Response:
                return client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3} | fields, headers=who)

            slow = [pool.submit(ask, a, guided_json=bombs[0]) for _ in range(2)]
            deferred = ""
            while not deferred:
                seen = client.get("/metrics").text.splitlines()
                deferred = next(
                    (x for x in seen if "deferred" in x and not x.startswith("#") and not x.endswith(" 0.0")), ""
                )
            for stream in (False, True):
                answer = ask(a, guided_json=bombs[1], stream=stream)
                assert answer.status_code == 429 and answer.headers["Retry-After"] == "1", answer.text
                error = answer.json()["error"]
                assert (error["type"], error["param"]) == ("RateLimitError", "guided_json"), error
            assert ask(b, guided_choice=["yes", "no"]).status_code == 200
            assert {each.result().status_code for each in slow} == {400}
            assert ask(a, guided_choice=["yes", "no"]).status_code == 200
    finally:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(
        "gpt2-tiny", "--port", "0", "--kv-cache-memory-bytes", "50000000", "--disable-any-whitespace"
    )
    server.wait_until_ready()
    yield server
    server.close()


def test_what_only_the_compiler_finds_is_a_400_before_the_first_byte(server: ServerProcess) -> None:
    """Streamed or not, among neighbours that do not notice."""
    plain = {"prompt": "ROMEO:", "max_tokens": 60, "temperature": 0}
    not_anything = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    bad: list[dict[str, Any]] = [
        {"guided_grammar": "root ::= nothing"}, {"guided_json": {"$ref": "#"}}, {"guided_regex": "(?=a)b"}, {"guided_regex": "("},
        {"guided_json": nested(200)}, {"guided_json": nested(400)}, {"response_format": not_anything},
        {"guided_regex": "(" * 5000 + ")" * 5000}, {"guided_regex": "a{" + "9" * 60_000 + "}"},
    ]  # fmt: skip
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(8) as pool:
        alone = client.post(COMPLETIONS, json=plain).json()["choices"][0]["text"]
        neighbours = [pool.submit(client.post, COMPLETIONS, json=plain) for _ in range(2)]
        for fields in bad:
            for stream in (False, True):
                response = client.post(COMPLETIONS, json=plain | fields | {"stream": stream})
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == next(iter(fields))
                assert response.json()["error"]["message"].startswith(next(iter(fields)))
                assert len(response.json()["error"]["message"]) < 250
        assert [n.result().json()["choices"][0]["text"] for n in neighbours] == [alone, alone]


def test_a_forced_tool_whose_parameters_no_grammar_can_follow_is_a_400(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}
    body = {"messages": [{"role": "user", "content": "Look!"}], "tools": [tool], "tool_choice": "required"}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("beside", [{}, {"response_format": BY_SCHEMA}, {"guided_regex": "a"}])
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_written_by_a_small_model_too(
    server: ServerProcess, beside: dict[str, Any], seed: int
) -> None:
    """It wins over a format beside it, and its grammar has no white space that only fills: gpt2-tiny would write nothing else."""
    parameters = {"type": "object", "properties": {"at": {"enum": ["sun", "moon"]}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    body = {
        "messages": [{"role": "user", "content": "Look!"}],
        "tools": [tool],
        "tool_choice": "required",
        "seed": seed,
        "parallel_tool_calls": False,  # else it may go on and on
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body | beside | {"max_tokens": 200})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert calls and choice["finish_reason"] in ("tool_calls", "stop"), choice
    assert all(json.loads(call["function"]["arguments"])["at"] in ("sun", "moon") for call in calls)


def test_openai_client_gets_an_object_of_the_schema(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask: Any = {
            "model": "gpt2-tiny",
            "messages": [{"role": "user", "content": "What?"}],
            "response_format": BY_SCHEMA,
        }
        whole = client.chat.completions.create(**ask, n=3, seed=1)
        for choice in whole.choices:
            assert choice.finish_reason == "stop" and 0 <= json.loads(choice.message.content or "")["answer"] <= 9
        stream = client.chat.completions.create(**ask, seed=1, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content
