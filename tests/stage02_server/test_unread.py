"""Answers that clients do not read: in pieces, bounded per key, and nobody else pays for them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess, rest
from standstill import LONGEST, Standstill
from starlette.types import Message, Receive, Scope, Send

from stage02_server.api_server import LAYERS
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.unread import PIECE, SPARE, Reader, Unread, UnreadMiddleware
from stage02_server.middleware import CONNECTION, TENANT
from stage03_engine.plugins import parts

MIB = 2**20
ANSWER = {"prompt": "a b " * 120_000, "return_token_strs": True}  # more than what the limit and the kernel hold


class Client:
    """A connection as the server sees it."""

    def __init__(self, waiting: int = 0) -> None:
        self.waiting, self.is_cut = waiting, False
        self.reader = Reader({"abort": self._abort, "waiting": lambda: self.waiting})

    def _abort(self) -> None:
        self.is_cut, self.waiting = True, 0


def with_body(size: int) -> Client:
    client = Client()
    client.reader.body = bytes(size)
    return client


def test_who_has_read_nothing_for_the_longest_time_is_cut() -> None:
    unread, clients = Unread(10 * MIB), [with_body(3 * MIB) for _ in range(3)]
    for client in clients:
        unread.grow(client.reader)
    unread.progress(clients[0].reader)
    unread.grow((newest := with_body(3 * MIB)).reader)
    assert [client.is_cut for client in (*clients, newest)] == [False, True, False, False]


def test_one_answer_alone_may_have_any_size() -> None:
    unread, huge = Unread(MIB), with_body(50 * MIB)
    unread.grow(huge.reader)
    assert not huge.is_cut
    unread.grow((small := with_body(PIECE)).reader)
    assert huge.is_cut and not small.is_cut


def test_bytes_that_many_read_count_once() -> None:
    unread, body = Unread(10 * MIB), bytes(8 * MIB)
    clients = [Client(waiting=PIECE) for _ in range(16)]
    for client in clients:
        client.reader.body = body
        unread.grow(client.reader)
    assert not any(client.is_cut for client in clients)


def test_what_has_been_read_does_not_count() -> None:
    unread = Unread(10 * MIB)
    for _ in range(100):
        unread.grow((client := with_body(3 * MIB)).reader)
        client.reader.body = b""
        assert not client.is_cut
    assert len(unread.readers) < 10


def test_what_lies_in_connections_counts_too() -> None:
    unread, clients = Unread(MIB), [Client(waiting=PIECE) for _ in range(64)]
    for client in clients:
        unread.grow(client.reader)
    still = [client for client in clients if not client.is_cut]
    assert still and still == clients[-len(still) :] and len(still) * PIECE <= MIB * 9 // 8


async def never(scope: Scope, receive: Receive, send: Send) -> None: ...


def test_addresses_are_forgotten() -> None:
    middleware = UnreadMiddleware(never, FrontendArgs())
    for number in range(5 * SPARE):
        middleware.of({"client": (f"10.0.{number >> 8}.{number & 255}", 1)})
    assert len(middleware.keys) <= SPARE + 1


@pytest.mark.parametrize("tenant", [None, 0, 1])
def test_each_key_and_each_address_has_its_own(tenant: int | None) -> None:
    middleware = UnreadMiddleware(never, FrontendArgs())
    others = [middleware.of({"client": (address, 1)}) for address in ("10.0.0.1", "10.0.0.2")]
    before = TENANT.set(tenant)
    own = [middleware.of({"client": (address, 1)}) for address in ("10.0.0.1", "10.0.0.2")]
    TENANT.reset(before)
    assert others[0] is not others[1]
    assert own == others if tenant is None else own[0] is own[1] and own[0] not in others


def test_no_answer_gets_past_it() -> None:
    outermost = next(part.name for place in LAYERS for part in parts("middleware", place))
    assert outermost.endswith("unread:UnreadMiddleware")


class Uvicorn:
    """Takes messages as uvicorn does: waits before it takes one while `room` is clear."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.room = asyncio.Event()
        self.most = 10**9

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self.most:
            await self.room.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


START = {"type": "http.response.start", "status": 200, "headers": []}
BODY = bytes(range(256)) * 1024  # four pieces


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7])
@pytest.mark.parametrize("more", [False, True])
def test_pieces_are_the_answer(size: int, more: bool) -> None:
    server = Uvicorn()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": BODY[:size], "more_body": more})
        if more:
            await send({"type": "http.response.body", "body": b"end", "more_body": False})

    asyncio.run(UnreadMiddleware(app, FrontendArgs())({"type": "http"}, None, server.send))  # type: ignore[arg-type]
    pieces = server.sent[1:]
    assert server.body == BODY[:size] + (b"end" if more else b"")
    assert all(len(piece["body"]) <= PIECE for piece in pieces)
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_an_event_that_is_cancelled_in_the_middle_is_sent_to_its_end() -> None:
    """The last words of a stream come behind a whole event."""
    server = Uvicorn()
    server.most = 3  # the start and two pieces

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        task = asyncio.create_task(send({"type": "http.response.body", "body": BODY, "more_body": True}))  # type: ignore[arg-type]
        while len(server.sent) < server.most:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.room.set()
        await send({"type": "http.response.body", "body": b"last words", "more_body": False})

    asyncio.run(UnreadMiddleware(app, FrontendArgs())({"type": "http"}, None, server.send))  # type: ignore[arg-type]
    assert server.body == BODY + b"last words" and not server.sent[-1]["more_body"]


def test_an_answer_that_nobody_finishes_ends_with_its_connection() -> None:
    server, client = Uvicorn(), Client()
    server.most = 3

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        task = asyncio.create_task(send({"type": "http.response.body", "body": BODY, "more_body": False}))  # type: ignore[arg-type]
        while len(server.sent) < server.most:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    scope = {"type": "http", "extensions": {CONNECTION: client.reader.connection}}
    asyncio.run(UnreadMiddleware(app, FrontendArgs())(scope, None, server.send))  # type: ignore[arg-type]
    assert client.is_cut


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two keys, and the least that may be unread of each."""
    keys = ("--api-key", "one", "two", "--max-unread-bytes", str(MIB))
    server = ServerProcess("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0", *keys)
    server.wait_until_ready()
    yield server
    server.close()


def ask(server: ServerProcess, key: str) -> socket.socket:
    """Ask for a large answer, and wait for its first bytes only."""
    url, body = httpx.URL(server.url), json.dumps(ANSWER).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.settimeout(PATIENCE)
    client.connect((url.host, url.port))
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n"
    client.sendall(head.encode() + b"Connection: close\r\nContent-Type: application/json\r\n\r\n" + body)
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def is_whole(client: socket.socket) -> bool:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
    answer = rest(client)
    (length,) = re.findall(rb"content-length: (\d+)", answer)
    return len(answer.partition(b"\r\n\r\n")[2]) == int(length)


def test_a_key_that_leaves_too_much_unread_loses_its_own_answers_only(server: ServerProcess) -> None:
    other = ask(server, "two")
    own = [ask(server, "one") for _ in range(3)]
    found = [is_whole(client) for client in own]
    assert found[-1] and not any(found[:-1]) and is_whole(other)


def test_who_reads_is_never_cut(server: ServerProcess) -> None:
    """Far more than the limit in all, beside answers that wait."""
    waiting = [ask(server, "one")]
    with httpx.Client(headers={"Authorization": "Bearer one"}, timeout=PATIENCE) as client:
        answers = [client.post(f"{server.url}/tokenize", json=ANSWER) for _ in range(2)]
    assert len({len(answer.content) for answer in answers}) == 1 and len(answers[0].content) > 5 * PIECE
    for each in waiting:
        each.close()


@pytest.mark.long
def test_standstill_of_many_who_read_a_large_stored_response() -> None:
    server = ServerProcess("gpt2-tiny", "--engine", "echo", "--host", "127.0.0.1", "--port", "0")
    try:
        url = httpx.URL(server.wait_until_ready())
        tools = [{"type": "function", "name": "f", "description": "x" * 7_900_000}]
        body = {"input": "x", "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
        name = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE).json()["id"]
        head = f"GET /v1/responses/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        with Standstill(server.url) as standstill:
            clients = [socket.create_connection((url.host, url.port or 0), PATIENCE) for _ in range(32)]
            for client in clients:
                client.sendall(head)
            with ThreadPoolExecutor(len(clients)) as readers:
                assert all(readers.map(is_whole, clients))
    finally:
        server.close()
    assert standstill.seconds < LONGEST
