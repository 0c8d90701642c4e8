"""Routes that the first request loads: it is answered as if they had been there, whoever else asks meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server_under_test import InProcessServer

from stage02_server.api_server import REFUSED, Services, served_paths
from stage02_server.routes import LateRoutes
from stage03_engine.plugins import Part, features

MESSAGE = {"model": "byte-model", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
LATE = [part for each in features() for part in each.parts if part.late]


@pytest.mark.parametrize("part", LATE, ids=lambda part: part.module)
def test_a_manifest_names_the_paths_of_its_routes(part: Part) -> None:
    assert {route.path for route in import_module(part.module).router.routes} == part.paths.keys()


def late_of(server: InProcessServer) -> set[str]:
    return {
        route.path for route in server.app.router.routes if isinstance(getattr(route, "endpoint", None), LateRoutes)
    }


def test_the_first_request_loads_the_routes_and_no_others(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server()
    served, waiting = served_paths(server.app.routes), late_of(server)
    assert {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/docs"} <= waiting
    assert server.post("/v1/messages", MESSAGE).json()["role"] == "assistant"
    assert waiting - late_of(server) == {"/v1/messages", "/v1/messages/count_tokens"}
    assert served_paths(server.app.routes) == served, "nothing is lost, and nothing is there twice"
    names = [getattr(route, "name", "") for route in server.app.router.routes]
    assert set(names[names.index(REFUSED) :]) == {REFUSED}, "the refusals come last, as before"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/messages", 405, "POST"), ("PUT", "/v1/responses/resp_1", 405, "DELETE, GET"), ("POST", "/v1/responses/a/b", 404, None),
        ("PUT", "/", 405, "GET"), ("GET", "/docs/nothing.js", 404, None), ("PATCH", "/tokenize", 405, "POST"),
    ],
)  # fmt: skip
def test_the_first_request_may_be_wrong(
    make_server: Callable[..., InProcessServer], method: str, path: str, status: int, allow: str | None
) -> None:
    server = make_server()
    first, second = server.request(method, path), server.request(method, path)
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert first.status_code == status
    assert allow is None or set(first.headers["allow"].split(", ")) == set(allow.split(", "))


def test_many_ask_first(make_server: Callable[..., InProcessServer]) -> None:
    server = make_server()

    async def ask() -> list[httpx.Response]:
        messages = [server.send("POST", "/v1/messages", json=MESSAGE) for _ in range(8)]
        texts = [server.send("POST", "/tokenize", json={"prompt": "a"}) for _ in range(8)]
        return await asyncio.gather(*messages, *texts)

    assert [answer.status_code for answer in server.run(ask())] == [200] * 16
    routes = [route for route in served_paths(server.app.routes) if route == "/v1/messages"]
    assert len(routes) == 1


def test_the_event_loop_goes_on_meanwhile(
    make_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, load = threading.Event(), Part.load

    def slow(part: Part) -> Any:
        assert go_on.wait(30), "nobody else had a turn"
        return load(part)

    server = make_server()

    async def ask() -> tuple[int, int]:
        monkeypatch.setattr(Part, "load", slow)
        first = asyncio.create_task(server.send("POST", "/v1/messages", json=MESSAGE))
        await asyncio.sleep(0.05)
        other = await server.send("GET", "/health")
        assert not first.done()
        go_on.set()
        return (await first).status_code, other.status_code

    assert server.run(ask()) == (200, 200)


def test_what_cannot_be_loaded_is_tried_again(
    make_server: Callable[..., InProcessServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    with monkeypatch.context() as patch:
        patch.setattr(Part, "load", lambda part: _fail)
        assert server.post("/v1/messages", MESSAGE).status_code == 500
    assert server.post("/v1/messages", MESSAGE).status_code == 200
    assert "/v1/messages" not in late_of(server)


def _fail(app: FastAPI, services: Services) -> None:
    raise RuntimeError("out of memory")


def test_a_feature_reaches_the_handlers_that_come_later(make_server: Callable[..., InProcessServer]) -> None:
    usage = make_server(enable_prompt_tokens_details=True).post("/v1/messages", MESSAGE).json()["usage"]
    assert usage["cache_read_input_tokens"] == 0
    busy = make_server(max_num_queued_reqs=1)
    busy.client.added.clear()
    assert busy.post("/v1/messages", MESSAGE).status_code == 200
    assert busy.app.state.services.added.admit, "the bound of the queue looks at every handler"
