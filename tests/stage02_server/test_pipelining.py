"""Clients that send requests without waiting for answers: each gets all of its answers, in order, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from patience import PATIENCE
from server_under_test import ServerProcess, rest
from standstill import LONGEST, Standstill
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.connection_limits import LimitedHttpProtocol
from stage02_server.features.hardening.slow_clients import TimedHttpProtocol, timed_protocol

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


class Transport(asyncio.Transport):
    """A client's connection, without the network."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.reading, self.closed = b"", True, False

    def write(self, data: Any) -> None:
        self.answers += bytes(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


class Connection:
    """uvicorn's connection as the server sets it up, and an application that names the path and waits if it is `/wait`."""

    def __init__(self, **args: Any) -> None:
        self.go = asyncio.Event()
        config = Config(self.app, http=timed_protocol(FrontendArgs(**args)), log_config=None, interface="asgi3")
        config.load()
        self.protocol: TimedHttpProtocol = config.http_protocol_class(
            config=config, server_state=ServerState(), app_state={}
        )  # type: ignore
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            await self.go.wait()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"<{scope['path']}>".encode()})

    @property
    def answered(self) -> list[str]:
        return re.findall(r"</(\w+)>", self.transport.answers.decode())


async def ticks(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(check: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(check, PATIENCE))


@pytest.mark.parametrize(("limit", "requests"), [(1, 50), (4, 1000), (64, 20_000)])
def test_what_waits_is_bounded_and_nothing_more_is_read(limit: int, requests: int) -> None:
    """However much comes in one piece: what is beyond the limit is not even parsed before there is room for it."""

    async def check() -> None:
        connection = Connection(max_pipelined_requests=limit)
        connection.protocol.data_received(get("/wait") + get("/x") * requests)
        await ticks()
        assert len(connection.protocol.pipeline) == limit and not connection.transport.reading
        connection.protocol.data_received(get("/late"))  # TLS may bring what was read before
        connection.go.set()
        while not connection.transport.reading:
            await asyncio.sleep(0)
            assert len(connection.protocol.pipeline) <= limit
        await ticks(3 * limit + 20)
        assert connection.answered == ["wait", *["x"] * requests, "late"]
        connection.protocol.connection_lost(None)

    run(check())


def test_large_headers_of_those_who_wait_are_bounded_too() -> None:
    async def check() -> None:
        connection = Connection(h11_max_incomplete_event_size=1024)
        connection.protocol.data_received(get("/wait") + get("/x", "A: " + "a" * 500) * 50)
        await ticks()
        waiting = connection.protocol.pipeline
        # As many as can be in a piece that was parsed at once; 500 of them would be allowed by their number.
        assert 2 <= len(waiting) < 50 and not connection.transport.reading
        connection.go.set()
        while not connection.transport.reading:
            await asyncio.sleep(0)
        await ticks()
        assert len(connection.answered) == 51
        connection.protocol.connection_lost(None)

    run(check())


def test_who_leaves_while_requests_wait_leaves_nothing_behind() -> None:
    async def check() -> None:
        connection = Connection(max_pipelined_requests=2)
        connection.protocol.data_received(get("/wait") + get("/x") * 100)
        await ticks()
        connection.transport.closed = True
        connection.protocol.connection_lost(None)
        connection.go.set()
        await ticks()
        assert connection.answered == [] and len(connection.protocol.tasks) == 0

    run(check())


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1, 5), cuts=st.lists(st.integers(0, 2000), max_size=8), waits=st.lists(st.booleans(), max_size=20),
    lines=st.integers(0, 40),
)  # fmt: skip
def test_pieces_do_not_matter(limit: int, cuts: list[int], waits: list[bool], lines: int) -> None:
    """Bodies full of line ends are no requests; wherever the bytes are cut, each request has its own answer, in order."""
    body = b"\n" * lines
    post = b"POST /post HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    data = b"".join(get("/wait") + post if wait else post + get("/x") for wait in waits)
    expected = [word for wait in waits for word in (("wait", "post") if wait else ("post", "x"))]
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})

    async def check() -> None:
        connection = Connection(max_pipelined_requests=limit)
        waiting = [data[start:end] for start, end in pairwise(places)]
        while len(connection.answered) < len(expected):
            if waiting and connection.transport.reading:
                connection.protocol.data_received(waiting.pop(0))
            else:
                connection.go.set()
            assert len(connection.protocol.pipeline) <= limit
            await asyncio.sleep(0)
        assert connection.answered == expected and not connection.transport.closed
        connection.protocol.connection_lost(None)

    run(check())


@pytest.mark.parametrize(
    ("form", "most"),
    [("Content-Length: %d\r\n\r\n%s", 10), ("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", 6000)],
)
def test_a_body_of_line_ends_is_parsed_in_few_pieces(form: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there is room for one more request only: else 100,000 pieces of two bytes would hold up everybody."""
    pieces = []
    parse = LimitedHttpProtocol.data_received
    monkeypatch.setattr(
        LimitedHttpProtocol, "data_received", lambda self, data: (pieces.append(data), parse(self, data))
    )

    async def check() -> None:
        connection = Connection()
        post = "POST /post HTTP/1.1\r\nHost: x\r\n" + form % (100_000, "\n" * 100_000)
        connection.protocol.data_received(get("/x") * 63 + post.encode() + get("/last"))
        assert len(pieces) < most
        await ticks(200)
        assert connection.answered == ["x"] * 63 + ["post", "last"]
        connection.protocol.connection_lost(None)

    run(check())


def test_offers_of_another_protocol_are_ignored() -> None:
    """Java's client makes one with each request: uvicorn dropped the body, and what came behind."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")
    post = b"\r\n".join(
        [b"POST /post HTTP/1.1", b"Host: x", *map(str.encode, offer), b"Content-Length: 5", b"", b"1\r\n34"]
    )
    bodies = []

    async def check(size: int) -> None:
        data = (post + get("/x", *offer)) * 200
        connection = Connection()
        receive = RequestResponseCycle.receive

        async def noting(cycle: RequestResponseCycle) -> Any:
            bodies.append((message := await receive(cycle))["body"])  # type: ignore[typeddict-item]
            return message

        RequestResponseCycle.receive = noting  # type: ignore[method-assign, assignment]
        try:
            for start in range(0, len(data), size):
                connection.protocol.data_received(data[start : start + size])
                await ticks(6)
            await ticks(2000)
        finally:
            RequestResponseCycle.receive = receive  # type: ignore[method-assign]
        assert connection.answered == ["post", "x"] * 200
        connection.protocol.connection_lost(None)

    for size in (7, 100_000):
        run(check(size))
        assert b"".join(bodies) == b"1\r\n34" * 200
        bodies.clear()


NONSENSE = [
    pytest.param(b"GARBAGE\r\n\r\n", id="no HTTP"),
    pytest.param(get("/many", *["A: b"] * 300), id="header"),
    pytest.param(b"POST /bad HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n", id="body"),
]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("waits", [False, True])
def test_who_sends_nonsense_gets_the_answers_to_what_came_before(nonsense: bytes, waits: bool) -> None:
    """In order: an error now would be taken for the answer to the first of them, or stand in the middle of it."""

    async def check() -> None:
        connection = Connection()
        connection.protocol.data_received(get("/x") + get("/wait") + get("/y") + nonsense + get("/z") * 100)
        if waits:
            await ticks()
        connection.protocol.data_received(nonsense)
        connection.go.set()
        await ticks()
        assert connection.answered == ["x", "wait", "y"] and connection.transport.closed
        assert b" 400 " not in connection.transport.answers and b" 431 " not in connection.transport.answers
        connection.protocol.connection_lost(None)

    run(check())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """It waits for nobody who is slow: who is ahead must not be taken for it."""
    limits = ("--request-header-timeout", "--request-body-timeout", "--timeout-keep-alive")
    server = ServerProcess(*ECHO, "--max-pipelined-requests", "3", *(word for limit in limits for word in (limit, "1")))
    server.wait_until_ready()
    yield server
    server.close()


def connect(server: ServerProcess) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=PATIENCE)


def test_each_is_answered_in_order(server: ServerProcess) -> None:
    """Behind a stream that takes longer than a client may take to send a request."""
    ask = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with connect(server) as client:
        client.sendall((head % len(ask)).encode() + ask)
        for number in range(500):
            client.sendall(get(f"/docs/{number}"))
        client.sendall(get("/docs/end", "Connection: close"))
        answer = rest(client)
    assert answer.count(b"data: [DONE]") == 1
    assert re.findall(rb"/docs has no (\w+)\.", answer) == [*(b"%d" % number for number in range(500)), b"end"]


def test_the_description_is_made_once(server: ServerProcess) -> None:
    with connect(server) as client:
        client.sendall(get("/openapi.json") * 20 + get("/openapi.json", "Connection: close"))
        answer = rest(client)
    bodies = {part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]}
    assert answer.count(b"HTTP/1.1 200 OK") == 21 and len(bodies) == 1


@pytest.mark.long
@pytest.mark.parametrize(("path", "count"), [("/health", 40_000), ("/openapi.json", 100_000), ("/", 40_000)])
def test_the_standstill_of_pipelined_requests(
    start_server: Callable[..., ServerProcess], path: str, count: int
) -> None:
    """One connection sends them all and reads nothing; then it closes."""
    server = start_server(*ECHO)
    server.wait_until_ready()
    with Standstill(server.url) as standstill:
        with connect(server) as client:
            data = get(path) * count
            client.settimeout(2)
            with contextlib.suppress(TimeoutError):  # the server reads no more
                client.sendall(data)
            client.settimeout(PATIENCE)
            assert client.recv(12) == b"HTTP/1.1 200"
            assert httpx.get(server.url + "/health").status_code == 200
        with httpx.Client(base_url=server.url) as neighbour:
            assert [neighbour.get("/health").status_code for _ in range(50)] == [200] * 50
    assert standstill.seconds < LONGEST


@pytest.mark.long
def test_the_standstill_of_pipelined_requests_that_are_all_answered(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(*ECHO)
    server.wait_until_ready()
    with Standstill(server.url) as standstill, connect(server) as client:
        for _ in range(8):
            client.sendall(get("/health") * 5000)
            seen = 0
            while seen < 5000:
                seen += client.recv(65536).count(b"200 OK")
    assert standstill.seconds < LONGEST
