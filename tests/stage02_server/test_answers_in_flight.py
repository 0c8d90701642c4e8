"""`--max-answers-per-key`: counted for each key, and given back however a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from server_under_test import InProcessServer, RecordingEcho

A, B = ({"Authorization": f"Bearer {key}"} for key in "ab")
MOST = 6
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2}),
    "stream": ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "n": 4}),
}


class Slow(RecordingEcho):
    """Takes nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def add_request_async(self, request: Any) -> None:
        self.asked.set()
        await self.may.wait()
        await super().add_request_async(request)


@pytest.fixture
def server() -> Iterator[InProcessServer]:
    server = InProcessServer(Slow(), api_key=("a", "b"), max_answers_per_key=MOST)
    yield server
    assert not any(server.app.state.answers_in_flight.values())
    server.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_has_so_many_and_no_more(kind: str, server: InProcessServer) -> None:
    path, body = KINDS[kind]

    async def scenario() -> None:
        first = asyncio.create_task(server.send("POST", path, json=body, headers=A))
        await server.client.asked.wait()
        refused = await server.send("POST", path, json=body, headers=A)
        assert refused.status_code == 429, refused.text
        assert "--max-answers-per-key" in refused.json()["error"]["message"]
        few = asyncio.create_task(server.send("POST", "/v1/completions", json={"prompt": "ab", "n": 2}, headers=A))
        others = asyncio.create_task(server.send("POST", path, json=body, headers=B))
        await asyncio.sleep(0)
        server.client.may.set()
        answers = await asyncio.gather(first, few, others, server.send("POST", "/v1/models", headers=A))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 405]
        again = await server.send("POST", path, json=body, headers=A)
        assert again.status_code == 200

    server.run(scenario())


def test_who_leaves_gives_them_back_and_who_comes_alone_is_served(server: InProcessServer) -> None:
    async def scenario() -> None:
        body = {"prompt": ["ab"] * MOST, "n": 2}
        first = asyncio.create_task(server.send("POST", "/v1/completions", json=body, headers=A))
        await server.client.asked.wait()
        assert sum(server.app.state.answers_in_flight.values()) == 2 * MOST
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        server.client.may.set()
        assert (await server.send("POST", "/v1/completions", json=body, headers=A)).status_code == 200

    server.run(scenario())


def test_a_refused_request_takes_nothing(server: InProcessServer) -> None:
    server.client.may.set()
    for _ in range(2 * MOST):
        refused = server.post("/v1/completions", {"prompt": ["ab", "c" * 1000], "n": 2}, headers=A)
        assert refused.status_code == 400
