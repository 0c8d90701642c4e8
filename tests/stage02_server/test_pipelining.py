"""Clients that send requests without waiting for answers: each gets all of its answers, in order, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import re
import socket
import string
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPMethod
from itertools import pairwise
from typing import Any

import httptools
import httpx
import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE
from server_under_test import ServerProcess, rest
from standstill import LONGEST, Standstill
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening import connection_limits, connection_turns
from stage02_server.features.hardening.connection_limits import LimitedHttpProtocol
from stage02_server.features.hardening.slow_clients import TimedHttpProtocol, timed_protocol

ECHO = ("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


class Transport(asyncio.Transport):
    """A client's connection, without the network."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(None if address is None else {"peername": (address, 1)})
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

    abort = write_eof = close  # the client closes as soon as the server has nothing more to say

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0


class Connection:
    """uvicorn's connection as the server sets it up, and an application that names the path and waits if it is `/wait`."""

    def __init__(
        self, http: type[TimedHttpProtocol] | None = None, address: str | None = None, forwarded: str = "", **args: Any
    ) -> None:
        self.go = asyncio.Event()
        http = http or timed_protocol(FrontendArgs(**args))
        proxied = {"proxy_headers": bool(forwarded), "forwarded_allow_ips": forwarded}
        config = Config(self.app, http=http, log_config=None, interface="asgi3", **proxied)  # type: ignore[arg-type]
        config.load()
        self.begun: list[str] = []  # paths
        self.protocol: TimedHttpProtocol = config.http_protocol_class(
            config=config, server_state=ServerState(), app_state={}
        )  # type: ignore
        self.transport = Transport(address)
        self.protocol.connection_made(self.transport)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
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


@pytest.mark.parametrize(("limit", "requests"), [(1, 50), (4, 1000), (64, 2000)])
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


CHUNKED = b"POST /post HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
WORK = {  # what takes long to parse for the bytes that it is
    **{f"chunks of {n}": CHUNKED + b"%x\r\n%s\r\n" % (n, b"a" * n) * 3000 + b"0\r\n\r\n" for n in (1, 2, 3, 16, 17)},
    "chunks of line ends": CHUNKED + b"1\r\n\n\r\n" * 3000 + b"0\r\n\r\n",
    "extensions": CHUNKED + b"1;a\r\na\r\n" * 3000 + b"0\r\n\r\n",
    "long extensions": CHUNKED + (b"1;" + b"a" * 1000 + b"\r\na\r\n") * 300 + b"0\r\n\r\n",
    "trailers": CHUNKED + b"0\r\n" + b"a:\r\n" * 200 + b"\r\n",
    "header": b"POST /post HTTP/1.1\r\n" + b"a:\r\n" * 200 + b"Content-Length: 0\r\n\r\n",
    "folded header": b"POST /post HTTP/1.1\r\na: b\r\n" + b" c\r\n" * 200 + b"Content-Length: 0\r\n\r\n",
    "line ends": b"\r\n" * 3000 + b"POST /post HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "requests": get("/x") * 500 + b"POST /post HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.slow(
    keep=(
        "7-chunks of 1]",
        "7-chunks of line",
        "7-trailers",
        "7-folded",
        "7-line ends",
        "0-long",
        "0-header",
        "0-requests",
    )
)
@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize("size", [7, 10**9])
def test_parsing_is_done_in_small_pieces_and_each_turn_of_the_loop_has_one(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all connections together, beyond the first piece of what each brings; and who sends little does not wait for them."""
    monkeypatch.setattr(connection_turns, "PARSING_SECONDS", 1e-9)
    # first pieces are no matter of how busy the machine is
    monkeypatch.setattr(connection_turns, "FIRST_SECONDS", PATIENCE)
    pieces: list[bytes] = []
    parse = LimitedHttpProtocol.data_received
    monkeypatch.setattr(
        LimitedHttpProtocol, "data_received", lambda self, data: (pieces.append(data), parse(self, data))
    )
    most_lines = connection_limits.LINES * connection_limits.MOST_REQUESTS
    most_bytes = connection_limits.BYTES * connection_limits.MOST_REQUESTS

    async def check() -> None:
        http = timed_protocol(FrontendArgs(h11_max_header_count=1024))
        connections, rest = [Connection(http) for _ in range(3)], [WORK[name]] * 3
        refused = name == "folded header"
        while any(rest):
            brought = 0
            for number, connection in enumerate(connections):
                if connection.transport.reading and not connection.transport.closed and rest[number]:
                    connection.protocol.data_received(rest[number][:size])
                    rest[number] = rest[number][size:]
                    brought += 1
                elif connection.transport.closed:
                    rest[number] = b""
            for piece in pieces:
                assert piece.count(b"\n") <= most_lines or len(piece) <= most_bytes
            if size > 7:
                assert len(pieces) <= brought + 1
            pieces.clear()
            await asyncio.sleep(0)
        while not all(connection.transport.closed or "post" in connection.answered for connection in connections):
            pieces.clear()
            await asyncio.sleep(0)
            assert len(pieces) <= 1
            newcomer = Connection(http)
            newcomer.protocol.data_received(get("/x"))
            assert pieces[-1] == get("/x")
            newcomer.protocol.connection_lost(None)
        for connection in connections:
            assert connection.answered[-1:] == ([] if refused and connection.transport.closed else ["post"])
            assert connection.protocol._held == b""
            connection.protocol.connection_lost(None)

    run(check())


def test_who_leaves_while_others_are_parsed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_turns, "PARSING_SECONDS", 1e-9)

    async def check() -> None:
        connection = Connection()
        connection.protocol.data_received(WORK["chunks of 1"])
        assert connection.protocol._held and not connection.transport.reading and connection.protocol.turns._line
        connection.transport.closed = True
        connection.protocol.connection_lost(None)
        assert not connection.protocol.turns._line
        await ticks()

    run(check())


@pytest.mark.parametrize("leaves", [False, True])
def test_requests_are_no_work_for_the_garbage_collector(leaves: bool) -> None:
    """It stops everything while it looks for cycles: 0.1 s after a few thousand requests that were parts of some."""

    async def check() -> None:
        connection = Connection()
        connection.protocol.data_received(get("/wait") + get("/x") * 60)
        await ticks()
        assert num_cycles() > 50
        if leaves:
            connection.transport.closed = True
            connection.protocol.connection_lost(None)
        connection.go.set()
        await ticks(400)
        assert num_cycles() < 3

    def num_cycles() -> int:
        return sum(isinstance(one, RequestResponseCycle) for one in gc.get_objects())

    gc.freeze()  # what is there already is of no interest, and takes long to look at
    gc.disable()
    try:
        run(check())
    finally:
        gc.enable()
        gc.unfreeze()


def test_addresses_take_turns_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections an address has: another one's request begins in the next turn."""
    monkeypatch.setattr(connection_turns, "FIRST_SECONDS", PATIENCE)

    async def check() -> None:
        http = timed_protocol(FrontendArgs())
        crowd = [Connection(http, "10.0.0.1") for _ in range(200)]
        for connection in crowd:
            connection.protocol.data_received(get("/x") * 2)
        others = [Connection(http, f"10.0.0.{number}") for number in (2, 3)]
        for other in others:
            other.protocol.data_received(get("/x"))
        before = 0
        for turn in range(1000):
            await asyncio.sleep(0)
            begun = sum(len(connection.begun) for connection in (*crowd, *others))
            assert begun - before <= connection_turns.STARTS
            before = begun
            if turn == 3:
                assert [other.answered for other in others] == [["x"], ["x"]]
        assert all(connection.answered == ["x", "x"] for connection in crowd)
        assert not http.starts._ready and not http.starts._taken

    run(check())


def test_an_address_has_so_many_requests_in_flight_and_the_others_wait() -> None:
    async def check() -> None:
        http = timed_protocol(FrontendArgs(max_requests_per_address=2, root_path="/llm"))
        crowd = [Connection(http, "10.0.0.1") for _ in range(5)]
        for connection in crowd:
            connection.protocol.data_received(get("/wait") + get("/x"))
        other, own, unix = Connection(http, "10.0.0.2"), Connection(http, "10.0.0.1"), Connection(http)
        for connection in (other, unix):
            connection.protocol.data_received(get("/wait"))
        for path in ("/health", "/llm/metrics"):
            own.protocol.data_received(get(path))
        await ticks()
        assert [connection.begun for connection in crowd] == [["/wait"], ["/wait"], [], [], []]
        assert other.begun == unix.begun == ["/wait"] and own.begun == ["/health", "/llm/metrics"]
        gone = crowd.pop(2)
        gone.transport.closed = True
        gone.protocol.connection_lost(None)
        for connection in (*crowd, other, unix):
            connection.go.set()
        await ticks(60)
        assert gone.begun == [] and [connection.answered for connection in crowd] == [["wait", "x"]] * 4
        assert not http.starts._taken and not http.starts._without_place

    run(check())


def test_a_place_is_free_again_however_its_request_ends() -> None:
    async def check() -> None:
        http = timed_protocol(FrontendArgs(max_requests_per_address=1))
        for number in range(4):
            connection = Connection(http, "10.0.0.1")
            if number % 2:
                connection.app = None  # type: ignore[method-assign, assignment]
            connection.protocol.data_received(get("/wait") if number < 2 else CHUNKED)
            await ticks()
            connection.transport.closed = True
            connection.protocol.connection_lost(None)
            connection.go.set()
            await ticks()
            assert not http.starts._taken and not http.starts._without_place and not http.starts._ready

    run(check())


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"), ("2001:db8:0:1::1", "2001:db8:0:1::/64"), ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"), ("x" * 9999, "x" * 64), ("", ""),
    ],
)  # fmt: skip
def test_what_is_one_address(address: str, network: str) -> None:
    assert connection_limits.network_of(address) == network


def test_behind_a_known_proxy_the_client_has_the_address() -> None:
    async def check(forwarded: str, number: int) -> None:
        http = timed_protocol(FrontendArgs(max_requests_per_address=1))
        clients = [Connection(http, "10.0.0.9", forwarded) for _ in range(3)]
        for client, name in zip(clients, ("1.1.1.1", "1.1.1.1", "2.2.2.2"), strict=True):
            client.protocol.data_received(get("/wait", f"X-Forwarded-For: 9.9.9.9, {name}"))
        await ticks()
        assert sum(len(client.begun) for client in clients) == number
        for client in clients:
            client.protocol.connection_lost(None)

    run(check("10.0.0.9", 2))
    run(check("10.0.0.8", 1))
    run(check("", 1))


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
    [("Content-Length: %d\r\n\r\n%s", 20), ("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", 6000)],
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


@pytest.mark.parametrize("name", ["requests", "chunks of 1", "one request", "a byte"])
def test_what_thousands_bring_in_one_turn_is_not_parsed_in_one_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little each of them brings; and all are answered, and nobody who comes later waits for them."""
    monkeypatch.setattr(connection_turns, "FIRST_SECONDS", 1e-9)
    monkeypatch.setattr(connection_turns, "PARSING_SECONDS", 1e-9)
    pieces: list[bytes] = []
    parse = LimitedHttpProtocol.data_received
    monkeypatch.setattr(
        LimitedHttpProtocol, "data_received", lambda self, data: (pieces.append(data), parse(self, data))
    )
    data = {"one request": get("/x"), "a byte": b"G"}.get(name) or WORK[name]

    async def check() -> None:
        http = timed_protocol(FrontendArgs())
        connections = [Connection(http) for _ in range(20)]
        for connection in connections:
            connection.protocol.data_received(data)
        assert len(pieces) == 1
        assert [connection.transport.reading for connection in connections[1:]] == [False] * 19
        newcomer = Connection(http)
        for _ in range(5):
            pieces.clear()
            await asyncio.sleep(0)
            assert len(pieces) <= 1
        while any(connection.protocol._held for connection in connections):
            pieces.clear()
            await asyncio.sleep(0)
            assert len(pieces) <= 1
        if name == "a byte":
            for connection in connections:
                connection.protocol.data_received(get("/x")[1:])
        newcomer.protocol.data_received(get("/x"))
        while not all(connection.answered for connection in (newcomer, *connections)):
            await asyncio.sleep(0)
        for connection in (newcomer, *connections):
            assert connection.transport.reading and not connection.transport.closed
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


def methods_of_the_parser() -> list[str]:
    """All that llhttp knows, asked for letter by letter: it stops at the first one that begins no method."""
    found, prefixes = [], [""]
    while prefixes:
        prefix = prefixes.pop()
        for letter in string.ascii_uppercase + "-_ ":
            with contextlib.suppress(httptools.HttpParserError):
                httptools.HttpRequestParser(object()).feed_data((prefix + letter).encode())
                if letter == " ":
                    found.append(prefix)
                else:
                    prefixes.append(prefix + letter)
    return sorted(found)


METHODS = methods_of_the_parser()
TARGETS = {"origin": "/x", "absolute": "http://x/x", "authority": "x:80", "asterisk": "*"}
BODIES = {
    "none": ([], ""), "length": (["Content-Length: 3"], "a\nb"), "chunks": (["Transfer-Encoding: chunked"], "1\r\na\r\n0\r\n\r\n"),
    "trailer": (["Transfer-Encoding: chunked"], "0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
}  # fmt: skip
OFFERS = {
    "none": [],
    "h2c": ["Connection: Upgrade", "Upgrade: h2c"],
    "two": ["connection:a,upgrade", "upgrade:websocket", "UPGRADE:b"],
}
VERSIONS = ("1.1", "1.0", "2.0", "0.9")
ENDS: dict[str, list[str]] = {"unsaid": [], "close": ["Connection: close"], "keep-alive": ["Connection: keep-alive"]}


def test_the_methods_are_found() -> None:
    assert {str(method) for method in HTTPMethod} | {"M-SEARCH", "PRI", "GET_PARAMETER"} <= set(METHODS)


@pytest.mark.slow(keep=("CONNECT]", "GET]", "POST]", "PRI]", "M-SEARCH]", "OPTIONS]"))
@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_every_form_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet of 39 bytes, CONNECT with an absolute target, was parsed for ever. Each request is answered, and then the one behind it;
    or there is one 400 and the connection ends."""
    calls = 0
    feed = HttpToolsProtocol.data_received

    def counted(self: HttpToolsProtocol, data: bytes) -> None:
        nonlocal calls
        calls += 1
        assert calls < 5000, "it parses for ever"
        feed(self, data)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", counted)

    async def check(data: bytes, size: int) -> tuple[int, int]:
        nonlocal calls
        calls, connection = 0, Connection()
        for start in range(0, len(data), size):
            connection.protocol.data_received(data[start : start + size])
        await ticks()
        connection.protocol.connection_lost(None)
        assert not connection.protocol.tasks
        answers = re.findall(rb"HTTP/1.1 (\d+) ", connection.transport.answers)
        return answers.count(b"200"), answers.count(b"400") if connection.transport.closed else 0

    async def check_all() -> None:
        for target, (more, body), offer in itertools.product(TARGETS.values(), BODIES.values(), OFFERS.values()):
            head = [f"{method} {target} HTTP/1.1", "Host: x", *more, *offer, "", ""]
            data = "\r\n".join(head).encode() + body.encode() + get("/x")
            ends = {await check(data, size) for size in (1, 7, len(data))}
            assert ends == {(0, 1)} or (method != "CONNECT" and ends == {(2, 0)}), (data, ends)
            assert method not in ("GET", "POST") or target == "x:80" or ends == {(2, 0)}, (data, ends)

    run(check_all())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_last_request_of_a_connection_is_answered_in_every_form(version: str, end: str) -> None:
    """With an offer of another protocol it was dropped: no answer, and the connection stayed. Now the connection ends behind the
    answer, or the next request has one too."""

    async def check(data: bytes, size: int) -> tuple[int, bool]:
        connection = Connection()
        for start in range(0, len(data), size):
            connection.protocol.data_received(data[start : start + size])
        await ticks()
        end = len(connection.answered), connection.transport.closed
        connection.protocol.connection_lost(None)
        assert re.findall(rb"HTTP/1.1 (\d+) ", connection.transport.answers) == [b"200"] * end[0]
        return end

    async def check_all() -> None:
        for method, (more, body), offer in itertools.product(("GET", "POST"), BODIES.values(), OFFERS.values()):
            head = [f"{method} /x HTTP/{version}", "Host: x", *more, *offer, *ENDS[end], "", ""]
            data = "\r\n".join(head).encode() + body.encode() + get("/x")
            ends = {await check(data, size) for size in (1, 7, len(data))}
            assert ends in ({(1, True)}, {(2, False)}), (data, ends)

    run(check_all())


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


@pytest.mark.parametrize("target", TARGETS.values())
def test_no_tunnel(server: ServerProcess, target: str) -> None:
    with connect(server) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + get("/health"))
        answer = rest(client)
    assert answer.count(b"HTTP/1.1") == 1 and b" 400 " in answer and b"it takes no CONNECT" in answer
    assert httpx.get(server.url + "/health").status_code == 200


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
