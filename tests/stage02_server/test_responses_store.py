"""Responses that outlive their request: the bounded store, background work, its events, and cancelling."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from patience import wait_until
from pydantic import BaseModel
from server_under_test import InProcessServer, RecordingEcho, ServerProcess

from stage02_server.features.responses.protocol import ResponsesRequest
from stage02_server.serving_engine import OpenAIServing
from stage03_engine.frontend.async_llm import AsyncLLM

RESPONSES = "/v1/responses"
BACKGROUND = {"input": "Hello", "background": True, "max_output_tokens": 6}
MakeServer = Callable[..., InProcessServer]


def post(server: InProcessServer, **body: Any) -> httpx.Response:
    return server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 2} | body)


def get(server: InProcessServer, name: str, query: str = "") -> httpx.Response:
    return server.request("GET", f"{RESPONSES}/{name}{query}")


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["param"]


def wait_until_done(server: InProcessServer, name: str) -> dict[str, Any]:
    wait_until(lambda: get(server, name).json()["status"] not in ("queued", "in_progress"), "it goes on and on", 0.001)
    return get(server, name).json()


def numbers(text: str) -> list[int]:
    data = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: "))["sequence_number"] for line in data]


@pytest.fixture
def stuck(make_server: MakeServer) -> InProcessServer:
    """A server whose engine never answers, with room for two responses."""
    return make_server(RecordingEcho(tick_seconds=3600), max_stored_responses=2)


@given(room=st.integers(1, 4), count=st.integers(1, 7))
@settings(max_examples=10, deadline=None)
def test_the_last_ones_are_kept(room: int, count: int) -> None:
    server = InProcessServer(max_stored_responses=room)
    try:
        names = [post(server).json()["id"] for _ in range(count)]
        found = [get(server, name).status_code for name in names]
        assert found == [404] * max(0, count - room) + [200] * min(count, room)
        gone = post(server, previous_response_id=names[0])
        assert gone.status_code == (404 if count > room else 200)
    finally:
        server.close()


def test_long_conversations_push_out_more(make_server: MakeServer) -> None:
    server = make_server(max_stored_bytes=100_000)
    long = [{"role": "user", "content": [{"type": "input_text", "text": "x" * 20}] * 2, "name": "y" * 40_000}]
    names = [post(server, input=long).json()["id"] for _ in range(3)]
    assert [get(server, name).status_code for name in names] == [404, 200, 200]


def test_a_stored_response_is_what_was_answered(server: InProcessServer) -> None:
    answer = post(server, metadata={"a": "b"}).json()
    assert get(server, answer["id"]).json() == answer
    assert error_of(get(server, answer["id"], "?stream=true")) == (400, "BadRequestError", "stream")
    cancel = server.post(f"{RESPONSES}/{answer['id']}/cancel", None)
    assert error_of(cancel) == (400, "BadRequestError", "response_id")


@pytest.mark.parametrize(("method", "path"), [("GET", "{}"), ("POST", "{}/cancel"), ("DELETE", "{}")])
def test_unknown_ids(server: InProcessServer, method: str, path: str) -> None:
    for name, status, kind in (("resp_no", 404, "NotFoundError"), ("cmpl-1", 400, "BadRequestError")):
        answer = server.request(method, f"{RESPONSES}/{path.format(name)}")
        assert error_of(answer) == (status, kind, "response_id")


def test_without_a_store(make_server: MakeServer) -> None:
    server = make_server(max_stored_responses=0)
    answer = post(server).json()
    assert answer["store"] is False and get(server, answer["id"]).status_code == 404
    refused = server.post(RESPONSES, BACKGROUND)
    assert error_of(refused)[0] == 400 and "--max-stored-responses" in refused.json()["error"]["message"]


def test_background_is_answered_at_once_and_done_later(server: InProcessServer) -> None:
    first = server.post(RESPONSES, BACKGROUND).json()
    assert (first["status"], first["output"], first["background"]) == ("queued", [], True)
    done = wait_until_done(server, first["id"])
    assert done["status"] == "incomplete" and done["output"][0]["content"][0]["text"] == "HelloH"
    assert get(server, first["id"], "?stream=true").status_code == 400, "it was not created with stream=true"
    later = post(server, previous_response_id=first["id"], input="!", max_output_tokens=30).json()
    assert later["output"][0]["content"][0]["text"].startswith("HelloHelloH!")


def test_events_can_be_read_again_from_anywhere(server: InProcessServer) -> None:
    whole = server.post(RESPONSES, BACKGROUND | {"stream": True}).text
    name = json.loads(whole.splitlines()[1].removeprefix("data: "))["response"]["id"]
    assert [line for line in whole.splitlines() if line.startswith("event")][:3] == [
        "event: response.created", "event: response.queued", "event: response.in_progress",
    ]  # fmt: skip
    count = len(numbers(whole))
    assert numbers(whole) == list(range(count)) and get(server, name, "?stream=true").text == whole
    for after in range(count):
        rest = get(server, name, f"?stream=true&starting_after={after}").text
        assert whole.endswith(rest) and numbers(rest) == list(range(after + 1, count))
    assert get(server, name, "?stream=true&starting_after=1000000").text == ""
    for wrong in ("-1", "x"):
        answer = get(server, name, f"?stream=true&starting_after={wrong}")
        assert error_of(answer) == (400, "Bad Request", "query.starting_after")


async def _leave_after_first_event(server: InProcessServer, body: dict[str, Any]) -> str:
    """Post, read the first event, hang up; returns the id of the response."""
    left = asyncio.Event()
    inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = b""

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        if sent:
            left.set()

    scope = {
        "type": "http", "method": "POST", "path": RESPONSES, "raw_path": RESPONSES.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    await server.app(scope, receive, send)
    return json.loads(sent.splitlines()[1].removeprefix(b"data: "))["response"]["id"]


def test_background_goes_on_without_its_reader(make_server: MakeServer) -> None:
    server = make_server(RecordingEcho(tick_seconds=0.001))
    name = server.run(_leave_after_first_event(server, BACKGROUND | {"stream": True}))
    done = wait_until_done(server, name)
    assert done["output"][0]["content"][0]["text"] == "HelloH" and not server.client.aborted  # type: ignore[attr-defined]


def test_foreground_ends_with_its_reader(stuck: InProcessServer) -> None:
    name = stuck.run(_leave_after_first_event(stuck, {"input": "Hello", "stream": True}))
    assert stuck.engine.num_unfinished_requests == 0 and len(stuck.client.aborted) == 1  # type: ignore[attr-defined]
    assert get(stuck, name).status_code == 404


def test_a_deleted_response_is_gone_and_those_that_continue_it_stay(server: InProcessServer) -> None:
    first, other = post(server).json(), post(server).json()
    later = post(server, previous_response_id=first["id"], input="!").json()
    answer = server.request("DELETE", f"{RESPONSES}/{first['id']}")
    assert (answer.status_code, answer.json()) == (200, {"id": first["id"], "object": "response", "deleted": True})
    for gone in (get(server, first["id"]), server.request("DELETE", f"{RESPONSES}/{first['id']}")):
        assert error_of(gone) == (404, "NotFoundError", "response_id")
    assert post(server, previous_response_id=first["id"]).status_code == 404
    assert get(server, other["id"]).json() == other and get(server, later["id"]).json() == later
    assert post(server, previous_response_id=later["id"]).status_code == 200


def test_a_running_response_is_ended_before_it_is_deleted(stuck: InProcessServer) -> None:
    async def session() -> tuple[str, list[dict[str, Any]], str]:
        name = await _leave_after_first_event(stuck, BACKGROUND | {"stream": True})
        reader = asyncio.create_task(stuck.send("GET", f"{RESPONSES}/{name}?stream=true&starting_after=1"))
        await asyncio.sleep(0)
        deleted = await asyncio.gather(*(stuck.send("DELETE", f"{RESPONSES}/{name}") for _ in range(2)))
        return name, [answer.json() for answer in deleted], (await reader).text

    name, deleted, text = stuck.run(session())
    assert deleted == [{"id": name, "object": "response", "deleted": True}] * 2 and numbers(text)[0] == 2
    assert stuck.engine.num_unfinished_requests == 0 and len(stuck.client.aborted) == 1  # type: ignore[attr-defined]
    assert get(stuck, name).status_code == 404
    again = [stuck.post(RESPONSES, BACKGROUND).status_code for _ in range(3)]
    assert again == [200, 200, 429], "there is room for two again"


def test_cancel(stuck: InProcessServer) -> None:
    name = stuck.post(RESPONSES, BACKGROUND).json()["id"]
    assert get(stuck, name).json()["status"] == "in_progress" and stuck.engine.num_unfinished_requests == 1
    early = post(stuck, previous_response_id=name)
    assert error_of(early) == (400, "BadRequestError", "previous_response_id")
    for _ in range(2):
        answer = stuck.post(f"{RESPONSES}/{name}/cancel", None)
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled" and answer.json()["output"] == []
    assert get(stuck, name).json() == answer.json()
    assert stuck.engine.num_unfinished_requests == 0 and len(stuck.client.aborted) == 1  # type: ignore[attr-defined]


def test_cancel_ends_the_streams_of_all_readers(stuck: InProcessServer) -> None:
    async def session() -> tuple[str, str]:
        name = await _leave_after_first_event(stuck, BACKGROUND | {"stream": True})
        reader = asyncio.create_task(stuck.send("GET", f"{RESPONSES}/{name}?stream=true&starting_after=1"))
        await asyncio.sleep(0)
        await stuck.send("POST", f"{RESPONSES}/{name}/cancel")
        return name, (await reader).text

    _, text = stuck.run(session())
    assert numbers(text)[0] == 2 and "response.in_progress" in text


@pytest.mark.parametrize("background", [False, True])
def test_the_end_of_the_server_cuts_a_stream_with_its_own_event(stuck: InProcessServer, background: bool) -> None:
    """Of all who read it: of a response in the background there may be several."""

    async def read() -> list[str]:
        body = {"input": "x", "stream": True, "background": background}
        readers = [asyncio.create_task(stuck.send("POST", "/v1/responses", json=body))]
        while not stuck.client.added:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        if background:
            name = stuck.client.added[0].rpartition("-")[0]  # type: ignore[attr-defined]
            get = stuck.send("GET", f"/v1/responses/{name}?stream=true&starting_after=0")
            readers.append(asyncio.create_task(get))
        for _ in range(100):
            await asyncio.sleep(0)
        stuck.app.state.gate.expire()
        return [answer.text for answer in await asyncio.gather(*readers)]

    for text in stuck.run(read()):
        *_, last = text.removesuffix("\n\n").split("\n\n")
        kind, data = last.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == "event: response.failed" and event["type"] == "response.failed" and "[DONE]" not in text
        assert event["response"]["status"] == "failed" and "shut down" in event["response"]["error"]["message"]
        assert event["sequence_number"] == numbers(text)[-2] + 1


def test_running_responses_are_not_forgotten_and_bounded(stuck: InProcessServer) -> None:
    names = [stuck.post(RESPONSES, BACKGROUND).json()["id"] for _ in range(2)]
    refused = stuck.post(RESPONSES, BACKGROUND)
    assert error_of(refused) == (429, "RateLimitError", None) and int(refused.headers["Retry-After"]) > 0
    assert stuck.engine.num_unfinished_requests == 2
    assert [get(stuck, name).json()["status"] for name in names] == ["in_progress"] * 2
    stuck.post(f"{RESPONSES}/{names[0]}/cancel", None)
    third = stuck.post(RESPONSES, BACKGROUND)
    assert third.status_code == 200 and get(stuck, names[0]).status_code == 404 and get(stuck, names[1]).is_success


def test_a_failure_in_the_background_is_kept(make_server: MakeServer) -> None:
    class Dying(RecordingEcho):
        async def add_request_async(self, request: Any) -> None:
            raise RuntimeError("at /secret/path")

    server = make_server(Dying())
    name = server.post(RESPONSES, BACKGROUND).json()["id"]
    failed = wait_until_done(server, name)
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error" and failed["output"] == []
    assert "/secret" not in json.dumps(failed)


def test_a_background_response_does_not_keep_the_server(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("gpt2-tiny", "--engine", "echo", "--port", "0", "--shutdown-timeout", "1000")
    url = server.wait_until_ready()
    answer = httpx.post(url + RESPONSES, json={"input": "Hello", "background": True})  # 2 s of work
    assert answer.json()["status"] == "queued"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0 and not [line for line in server.lines if "Error" in line or "Traceback" in line]


def test_impossible_flag(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("gpt2-tiny", "--max-stored-responses", "-1")
    assert server.wait() == 2 and "max_stored_responses must be at least 0" in server.lines[-1]


LONG = "x" * 40_000
FAT: dict[str, dict[str, Any]] = {
    "tools": {"tools": [{"type": "function", "name": "f", "description": LONG}], "tool_choice": "none"},
    "a schema": {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"description": LONG}}}},
    "many empty parts": {
        "input": [{"role": "user", "content": "x", "summary": [{"type": "summary_text", "text": ""}] * 1500}]
    },
    "a field that nobody reads": {"input": [{"role": "user", "content": "x", "encrypted_content": LONG}]},
    "long ids": {
        "input": [
            {"type": "function_call", "call_id": LONG, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": LONG, "output": "x"},
        ]
    },
}


@pytest.mark.parametrize("body", FAT.values(), ids=FAT)
def test_all_that_a_response_keeps_counts(make_server: MakeServer, body: dict[str, Any]) -> None:
    """Whatever it is: a stranger must not fill the memory with what nobody counts."""
    server = make_server(max_stored_bytes=3 * len(LONG))
    thin = [post(server).json()["id"] for _ in range(2)]
    assert [get(server, name).status_code for name in thin] == [200, 200]
    fat = [post(server, max_output_tokens=1, **body) for _ in range(3)]
    assert [answer.status_code for answer in fat] == [200] * 3
    names = [*thin, *(answer.json()["id"] for answer in fat)]
    found = [get(server, name).status_code for name in names]
    assert found[:3] == [404] * 3 and found[4] == 200


def filled(annotation: Any) -> Iterator[Any]:
    """Values of this type, each with LONG in another one of all the places that can hold a text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is str or annotation is Any:
        yield LONG
    elif origin is Annotated:
        yield from filled(inner[0])
    elif origin is list:
        yield from ([value] for value in filled(inner[0]))
    elif origin is dict:
        yield from ({"x": value} for value in filled(inner[1]))
        yield from ({value: "x"} for value in filled(inner[0]))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        needed = {(field.alias or name): sample(field.annotation) for name, field in annotation.model_fields.items()}
        needed = {name: value for name, value in needed.items() if value is not None}
        for name, field in annotation.model_fields.items():
            yield from (needed | {field.alias or name: value} for value in filled(field.annotation))
    elif origin in (Union, UnionType):
        for each in inner:
            yield from filled(each)


def sample(annotation: Any) -> Any:
    """A harmless value of this type where one helps a request to be served."""
    origin, inner = get_origin(annotation), get_args(annotation)
    samples = {str: "x", Literal: inner[0] if inner else None}
    if origin is Annotated:
        return sample(inner[0])
    if origin in (Union, UnionType):
        return None if type(None) in inner else sample(inner[0])
    return samples.get(origin or annotation)


SHARED = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    FrameType,
    asyncio.AbstractEventLoop,
    OpenAIServing,
    AsyncLLM,
)


def texts_in(thing: Any) -> int:
    """Characters and bytes of all texts with LONG that can be reached from an object, whoever holds them."""
    seen: set[int] = set()
    waiting, total = [thing], 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, SHARED):
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes):
            total += len(value) if (LONG if isinstance(value, str) else LONG.encode()) in value else 0
        else:
            waiting += gc.get_referents(value)
    return total


@pytest.mark.parametrize("background", [False, True])
def test_no_field_is_left_out_of_the_size(make_server: MakeServer, background: bool) -> None:
    """Every text of every field of a request, and of every item: what is kept of it counts."""
    tick = {"tick_seconds": 3600} if background else {}
    server = make_server(RecordingEcho(**tick), max_stored_bytes=2**30, max_stored_responses=10_000)
    bodies = [body for body in filled(ResponsesRequest) if body.get("input") != LONG]
    base = {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 1, "background": background}
    kept = 0
    for body in bodies:
        (name,) = [name for name, value in body.items() if LONG in str(value)]
        if name == "input":
            item = {"type": "message", "role": "user", "content": "x"} | {
                k: v for k, v in body["input"][0].items() if LONG in str(v)
            }
            body = {"input": [item]}
        answer = server.post(RESPONSES, base | {key: value for key, value in body.items() if key in (name, "input")})
        if answer.status_code == 200:
            entry = server.app.state.openai_serving_responses._store.get(answer.json()["id"], "")
            held = texts_in(entry)
            kept += held > 0
            assert entry.num_bytes >= held, name
    assert len(bodies) > 40 and kept >= 8


def test_what_no_item_has_is_not_kept(make_server: MakeServer) -> None:
    """Fields that nobody reads, however long, are dropped with the request."""
    server = make_server()
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "junk": LONG}], "junk": LONG}
    name = post(server, input=[item]).json()["id"]
    (entry,) = server.app.state.openai_serving_responses._store._entries.values()
    assert entry.id == name and LONG.encode() not in entry.body + b"".join(entry.items)


def test_what_runs_in_the_background_counts_too(make_server: MakeServer) -> None:
    """It cannot be forgotten, so beyond the bound no more begins."""
    server = make_server(RecordingEcho(tick_seconds=3600), max_stored_bytes=6 * len(LONG))
    body = BACKGROUND | FAT["tools"]
    names = [server.post(RESPONSES, body) for _ in range(3)]
    assert [answer.status_code for answer in names] == [200, 200, 429] and "retry-after" in names[2].headers


def test_the_trace_tells_how_work_in_the_background_ended(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """The engine hears of it, although no client waits."""
    server = start_server("gpt2-tiny", "--port", "0", "--engine", "echo", "--trace", str(tmp_path))
    body = {"input": "Hello", "background": True, "max_output_tokens": 400}
    httpx.post(server.wait_until_ready() + RESPONSES, json=body).raise_for_status()
    server.process.terminate()
    assert server.wait() == 0
    assert any('"request.aborted"' in file.read_text() for file in tmp_path.glob("*.jsonl"))
