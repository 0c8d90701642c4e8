"""The router before servers that are broken or taken over: what they say may be no HTTP, without an end, packed, or more than was asked for. A client
hears an answer, an error, or a connection that ends too early; never a part as if it were the whole, and never what belongs to somebody else."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.router import app as router_app, proxy, servers
from stage02_server.features.router.command import RouterFlags
from stage02_server.features.router.servers import Servers

PREFILL, DECODE = ("http://p0",), ("http://d0",)
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
SOON = 0.05  # seconds of a limit that is to be reached
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Pieces(httpx.AsyncByteStream):
    """Of an answer; `without_end` repeats them, and `cut` is how the connection ends before its time."""

    def __init__(self, *pieces: bytes, without_end: bool = False, cut: bool = False) -> None:
        self.pieces, self.without_end, self.cut, self.given = pieces, without_end, cut, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            for piece in self.pieces:
                await asyncio.sleep(0)
                self.given += len(piece)
                yield piece
            if not self.without_end:
                break
        if self.cut:
            raise httpx.ReadError("cut")


def said(pieces: Pieces, headers: Any = JSON, status: int = 200) -> httpx.Response:
    return httpx.Response(status, headers=headers, stream=pieces)


def fleet(of: dict[str, Callable[[httpx.Request], httpx.Response]], **flags: Any) -> tuple[Any, Servers]:
    """The router before servers that are functions: "p0 POST" is what p0 says to a POST. What is not named does what is right."""

    async def answer(request: httpx.Request) -> httpx.Response:
        if (found := of.get(f"{request.url.host} {request.method}")) is not None:
            return found(request)
        return said(Pieces(b'{"id": 1}'))

    fleet = Servers(PREFILL, DECODE, PATIENCE)
    fleet.client = httpx.AsyncClient(transport=httpx.MockTransport(answer), timeout=PATIENCE)
    for server in fleet.all:
        server.is_up = True
    return router_app.build_app(fleet, RouterFlags(PREFILL, DECODE, **flags), HardeningFlags()), fleet


async def ask(
    app: Any, body: dict[str, Any] | None, path: str = "/v1/completions"
) -> tuple[dict[str, Any], bytes, bool]:
    """(the start of the answer, its body, whether it says that it has ended). A GET without a body."""
    messages, sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}], list[Any]()

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": [], "query_string": b"", "http_version": "1.1",
    }  # fmt: skip
    async with asyncio.timeout(PATIENCE):
        await app(scope, receive, send)
    start, *rest = sent
    return start, b"".join(each["body"] for each in rest), not rest[-1].get("more_body", False)


def asked(app: Any, body: dict[str, Any] | None, path: str = "/v1/completions") -> tuple[dict[str, Any], bytes, bool]:
    return asyncio.run(ask(app, body, path))


BODY = {"prompt": "a"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_each_status_passes_or_is_an_error(path: str) -> None:
    """uvicorn knows those that it can say, and closes the connection for any other."""
    of, body = dict[str, Any](), None if path == "/v1/models" else BODY
    app, all_servers = fleet(of)
    for status in range(100, 1000):
        of["d0 POST" if body else "d0 GET"] = lambda _, status=status: said(Pieces(b"{}"), status=status)
        all_servers.decode[0].is_up = True
        start, _, ended = asked(app, body, path)
        assert ended and start["status"] == (status if 200 <= status < 600 else 503)


@pytest.mark.parametrize("stream", [False, True])
def test_each_byte_of_a_header_passes_or_is_an_error(stream: bool) -> None:
    """uvicorn closes the connection for what it cannot say."""
    of = dict[str, Any]()
    app, _ = fleet(of)
    for name in (b"content-type", b"Retry-After", b"x-own"):
        for byte in range(256):
            value = b"a" + bytes([byte]) + b"b"
            of["d0 POST"] = lambda _, name=name, value=value: said(Pieces(b"{}"), [(name, value)])
            start, _, ended = asked(app, BODY | {"stream": stream})
            headers = {key.lower(): each for key, each in start["headers"]}
            can_be_said = name == b"x-own" or not HEADER_VALUE_RE.search(value)
            assert ended and start["status"] == (200 if can_be_said else 503)
            assert headers.get(name.lower(), value) == (value if can_be_said else headers.get(name.lower(), value))
            assert b"x-own" not in headers


WHOLE = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n: alive\n\n'


@pytest.mark.parametrize("stream", [True, 1, "true", False, None], ids=str)
def test_a_stream_that_is_cut_anywhere_has_no_event_that_is_none(stream: Any) -> None:
    """Whatever the request called what the server takes for `true`: an error between two events, and else an answer that does not end."""
    of = dict[str, Any]()
    app, _ = fleet(of)
    for place in range(1, len(WHOLE) + 1):
        for first in {0, place // 2}:
            pieces = [each for each in (WHOLE[:first], WHOLE[first:place]) if each]
            of["d0 POST"] = lambda _, pieces=pieces: said(Pieces(*pieces, cut=True), EVENTS)
            _, body, ended = asked(app, BODY | {"stream": stream})
            assert ended is WHOLE[:place].endswith(b"\n\n")
            if ended:
                events = body.removeprefix(WHOLE[:place]).split(b"\n\n")
                assert json.loads(events[0][6:])["error"]["code"] == 503 and events[1:] == [b"data: [DONE]", b""]
            else:
                assert body == WHOLE[:place]


def test_json_that_is_cut_does_not_end() -> None:
    answers = {"d0 POST": lambda _: said(Pieces(b'{"a": 1}\n\n', cut=True))}
    assert asked(fleet(answers)[0], BODY)[1:] == (b'{"a": 1}\n\n', False)


def endless(kept: list[Pieces], piece: bytes) -> Callable[[httpx.Request], httpx.Response]:
    def say(request: httpx.Request) -> httpx.Response:
        kept.append(Pieces(piece, without_end=True))
        return said(kept[-1])

    return say


@pytest.mark.parametrize("piece", [b" ", b" " * 65536], ids=["a byte now and then", "as fast as it can"])
@pytest.mark.parametrize("who", ["prefill", "health", "models", "503"])
def test_what_has_no_end_is_not_waited_for(who: str, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor kept: no more than so many bytes."""
    monkeypatch.setattr(servers, "HEALTH_SECONDS", SOON)
    monkeypatch.setattr(router_app, "MODELS_SECONDS", SOON)
    monkeypatch.setattr(proxy, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(router_app, "MOST_BYTES", 1 << 20)
    kept = list[Pieces]()
    say = endless(kept, piece)
    if who == "prefill":
        app, _ = fleet({"p0 POST": say}, prefill_timeout_secs=SOON)
        start, body, ended = asked(app, BODY)
        assert (start["status"], body, ended) == (200, b'{"id": 1}', True)
    elif who == "health":
        _, all_servers = fleet({"p0 GET": say})

        async def look() -> None:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*map(all_servers.look, all_servers.all))

        asyncio.run(look())
        assert [server.is_up for server in all_servers.all] == [True, True]
    elif who == "models":
        start, _, ended = asked(fleet({"d0 GET": say})[0], None, "/v1/models")
        assert ended and start["status"] in (200, 503)
    elif len(piece) > 1:
        app, _ = fleet({"d0 POST": lambda request: said(say(request).stream, status=503)})  # type: ignore[arg-type]
        start, body, ended = asked(app, BODY)
        assert (start["status"], body, ended) == (503, b"", True)
    assert all(each.given <= (1 << 20) + len(piece) for each in kept) or len(piece) == 1


def test_what_is_packed_is_not_unpacked() -> None:
    """From a prefill server it is of no use, and what a decode server packs its client may unpack."""
    packed = gzip.compress(bytes(1 << 22))
    headers = [*JSON, (b"content-encoding", b"gzip")]
    pieces = [Pieces(packed), Pieces(packed)]
    app, _ = fleet({"p0 POST": lambda _: said(pieces[0], headers), "d0 POST": lambda _: said(pieces[1], headers)})
    start, body, ended = asked(app, BODY)
    assert ended and body == packed and dict(start["headers"])[b"content-encoding"] == b"gzip"


@pytest.mark.parametrize("said_there", [b"null", b"5", b"true", b'"a"', b"[]", b' {"a": 1} '])
def test_what_a_prefill_server_keeps_is_said_in_an_object(said_there: bytes) -> None:
    """A decode server would refuse all else, and its client would hear that about a field that it never sent."""
    heard: list[dict[str, Any]] = []

    def say(request: httpx.Request) -> httpx.Response:
        heard.append(json.loads(request.content))
        return said(Pieces(b"{}"))

    answers = {"p0 POST": lambda _: said(Pieces(b'{"kv_transfer_params":' + said_there + b"}")), "d0 POST": say}
    asked(fleet(answers)[0], BODY)
    assert heard == [BODY | ({"kv_transfer_params": {"a": 1}} if b"{" in said_there else {})]


def test_a_server_that_says_too_much_says_it_to_nobody() -> None:
    """Two answers to one request: the second one must not be that of the next client."""
    one = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                [length] = [
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ] or [0]
                body = json.loads(await reader.readexactly(length) or "{}")
                name = str(body.get("prompt", "health"))[:1].encode() * 4
                writer.write(one + b'"' + name + b' 1"' + one + b'"' + name + b' 2"')
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            all_servers = Servers([url + "/p"], [url], timeout=PATIENCE)
            async with all_servers.client:
                await asyncio.gather(*map(all_servers.look, all_servers.all))
                app = router_app.build_app(all_servers, RouterFlags((url + "/p",), (url,)), HardeningFlags())
                for prompt in "abcd":
                    _, body, ended = await ask(app, {"prompt": prompt})
                    assert (body, ended) == (f'"{prompt * 4} 1"'.encode(), True)
                _, body, _ = await ask(app, None, "/v1/models")
                assert body == b'"hhhh 1"'

    asyncio.run(run())


def test_a_cookie_is_kept_for_nobody() -> None:
    """A proxy before a server may set one for each session: the next client's request must not bring it."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: session=one\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            all_servers = Servers([url], [url], timeout=PATIENCE)
            async with all_servers.client:
                await asyncio.gather(*map(all_servers.look, all_servers.all))
                app = router_app.build_app(all_servers, RouterFlags((url,), (url,)), HardeningFlags())
                for body, path in ((BODY, "/v1/completions"), (None, "/v1/models"), (BODY, "/v1/completions")):
                    assert (await ask(app, body, path))[0]["status"] == 200

    asyncio.run(run())
    assert len(heads) == 7 and not any(b"cookie" in head.lower() for head in heads)


def test_the_log_says_why_a_server_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """That nobody listens is only one of the reasons: a certificate, or a name, may be wrong."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS here\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            all_servers = Servers([f"https://127.0.0.1:{port}"], [], timeout=PATIENCE)
            async with all_servers.client:
                await all_servers.look(all_servers.all[0])

    asyncio.run(run())
    [line] = [each.message for each in caplog.records if each.name == servers.__name__]
    assert "cannot be reached" in line and "SSL" in line
