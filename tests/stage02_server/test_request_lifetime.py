"""Requests that live side by side, end early, or lose their engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from server_under_test import InProcessServer, RecordingEcho, events

from stage03_engine.errors import EngineDeadError
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MakeServer = Callable[..., InProcessServer]


class DyingEcho(RecordingEcho):
    """Dies after some ticks."""

    def __init__(self, ticks: int) -> None:
        super().__init__(tick_seconds=0.01)  # time for each token to reach its stream
        self.ticks = ticks

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await super().get_output_async()
        self.ticks -= 1
        if self.ticks < 0:
            raise EngineDeadError("killed")
        return outputs


class HangingEcho(RecordingEcho):
    """Gives three tokens, then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = asyncio.Event()
        self.ticks = 3

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.ticks == 0:
            self.hangs.set()
            await asyncio.Event().wait()
        self.ticks -= 1
        return await super().get_output_async()


async def send_and_leave(server: InProcessServer, path: str, body: dict[str, Any], reads: bool = True) -> None:
    """A client that closes its connection as soon as the engine has begun, or when it should have read the first event."""
    sent = False
    full = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not server.client.added:
            await asyncio.sleep(0)
        if not reads:
            await full.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if not reads and message["type"] == "http.response.body":
            full.set()
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "client": None, "scheme": "http",
        "server": ("test", 80), "root_path": "",
    }  # fmt: skip
    await server.app(scope, receive, send)


def test_a_client_that_leaves_ends_its_beam_search(make_server: MakeServer) -> None:
    server = make_server(RecordingEcho(tick_seconds=3600))
    server.run(send_and_leave(server, COMPLETIONS, {"prompt": ["x", "y"], "n": 3, "use_beam_search": True}))
    assert sorted(server.client.aborted) == sorted(server.client.added) != []
    assert server.engine.num_unfinished_requests == 0


def test_a_client_that_leaves_without_reading_is_aborted_at_once(make_server: MakeServer) -> None:
    server = make_server(HangingEcho())

    async def check() -> None:
        await send_and_leave(server, COMPLETIONS, {"prompt": "x", "max_tokens": 60, "stream": True}, reads=False)
        assert server.client.aborted == server.client.added != []  # now, and not when the garbage collector comes by

    server.run(check())


def test_each_answer_of_a_seeded_request_has_its_own_seed(make_server: MakeServer) -> None:
    server = make_server()
    server.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "seed": 7, "max_tokens": 1})
    assert server.client.seeds == [7, 8, 9, 7, 8, 9]  # each prompt as if it had come alone


def test_64_clients_at_once_get_what_each_gets_alone(server: InProcessServer) -> None:
    bodies = [{"prompt": f"client {i}", "max_tokens": 20 + i % 7, "stream": i % 2 == 0} for i in range(64)]

    async def all_at_once() -> list[str]:
        answers = await asyncio.gather(*(server.send("POST", COMPLETIONS, json=body) for body in bodies))
        return [text_of(answer) for answer in answers]

    def text_of(answer: Any) -> str:
        chunks = events(answer.text) if answer.text.startswith("data") else [answer.json()]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    together = server.run(all_at_once())
    assert together == [text_of(server.post(COMPLETIONS, body)) for body in bodies]
    assert together == [(body["prompt"] * 4)[: body["max_tokens"]] for body in bodies]


def test_two_requests_with_the_same_id_do_not_mix(server: InProcessServer) -> None:
    async def both() -> Any:
        headers = {"X-Request-Id": "same"}
        return await asyncio.gather(
            *(server.send("POST", COMPLETIONS, json={"prompt": p, "max_tokens": 2}, headers=headers) for p in "ab")
        )

    answers = [response.json() for response in server.run(both())]
    assert [answer["id"] for answer in answers] == ["cmpl-same", "cmpl-same"]
    assert [answer["choices"][0]["text"] for answer in answers] == ["aa", "bb"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_dead_engine_ends_a_stream_with_an_error_event(make_server: MakeServer, path: str) -> None:
    server = make_server(DyingEcho(ticks=3))
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10, "stream": True}
    response = server.post(path, body)
    *chunks, last = events(response.text)
    assert response.status_code == 200 and len(chunks) >= 2 and all("choices" in chunk for chunk in chunks)
    assert last["error"]["code"] == 503
    assert server.post(path, body).status_code == 503  # and not a stream that only holds an error


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_miss_the_deadline_are_told(make_server: MakeServer, stream: bool) -> None:
    client = HangingEcho()
    server = make_server(client)

    async def cut() -> Any:
        body = {"prompt": "x", "max_tokens": 60, "stream": stream}
        request = asyncio.create_task(server.send("POST", COMPLETIONS, json=body))
        await client.hangs.wait()
        for _ in range(20):  # what was given reaches the stream
            await asyncio.sleep(0)
        server.app.state.services.gate.expire()
        return await request

    response = server.run(cut())
    answers = events(response.text) if stream else [response.json()]
    assert response.status_code == (200 if stream else 503)
    assert answers[-1]["error"]["code"] == 503 and (len(answers) > 1) == stream
    assert client.aborted == client.added and server.engine.num_unfinished_requests == 0


def test_the_prefix_cache_is_reset_unless_requests_run(make_server: MakeServer) -> None:
    assert make_server(server_dev_mode=True).post("/reset_prefix_cache", None).status_code == 200
    hanging = HangingEcho()
    busy = make_server(hanging, server_dev_mode=True)

    async def reset_during_a_request() -> int:
        running = asyncio.create_task(busy.send("POST", COMPLETIONS, json={"prompt": "abc", "max_tokens": 9}))
        await hanging.hangs.wait()
        refused = await busy.send("POST", "/reset_prefix_cache")
        running.cancel()
        await asyncio.wait([running])
        assert refused.json()["error"]["type"] == "ConflictError"
        return refused.status_code

    assert busy.run(reset_during_a_request()) == 409


class Flood(RecordingEcho):
    """An engine whose first ten steps are there at once, with 600 outputs each, for requests that are gone."""

    left = 10

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.left == 0:
            return await super().get_output_async()
        self.left -= 1
        return EngineCoreOutputs([EngineCoreOutput(f"gone-{i}", [1]) for i in range(600)])


def test_others_run_between_the_pieces_of_large_steps(make_server: MakeServer) -> None:
    client = Flood()
    server = make_server(client)

    async def turns_of_others() -> int:
        turns = 0
        while client.left:
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert server.run(turns_of_others()) >= 40, "600 outputs are five pieces"
