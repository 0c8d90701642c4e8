"""The way of a request: its prompt to a prefill server, the rest to a decode server, whose answer passes byte for byte.

A client sees a decode server's answers only. Whatever a prefill server refuses, or dies of, is left to the decode server, which computes the prompt
itself. A server that dies before the answer has begun costs time: the request goes on elsewhere, once. A stream that had begun ends with an
error.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stage02_server.errors import APIError, error_json, unavailable
from stage02_server.features.router.bodies import Body, params_in
from stage02_server.features.router.metrics import RouterMetrics
from stage02_server.features.router.servers import Server, Servers, reason
from stage02_server.middleware import ACCEPTED_ID
from stage02_server.streaming import ClientGoneError, run_until_disconnect
from stagetrace import trace

PASSED_ON = ("authorization", "x-api-key", "tracestate", "user-agent")
"""Headers of the client that are passed on to a server; the router makes content type, request id and traceparent itself."""
PASSED_BACK = (
    "content-type", "content-encoding", "retry-after", "www-authenticate", "cache-control", "x-accel-buffering", "x-request-id",
)  # fmt: skip
_CONTROLS = frozenset([*range(9), *range(10, 32), 127])  # bytes that no header may have
MOST_BYTES = 1 << 24
"""The most that the router reads for itself of a server's answer: where blocks are, why it cannot answer, which models it has."""
MOST_DEATHS = 2  # of servers that had the request: then it is refused, as it may be what kills them
GONE = (httpx.HTTPError, httpx.StreamError, OSError)


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """As bytes: what a client writes need not be ASCII."""
    return [(name.encode(), headers[name].encode("latin-1")) for name in PASSED_ON if name in headers]


class Ids(NamedTuple):
    """The names of a request, here and at all servers."""

    request: str
    trace: str
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def of(cls, headers: Headers) -> Ids:
        """The names that its client chose, or new ones."""
        given, parent = headers.get("x-request-id", ""), headers.get("traceparent", "").split("-")
        request = given if ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
        is_known = len(parent) == 4 and len(parent[1]) == 32 and set(parent[1]) <= set("0123456789abcdef")
        return cls(request, parent[1] if is_known else uuid.uuid4().hex, passed_on(headers))

    def for_server(self, span: str) -> list[tuple[bytes, bytes]]:
        """The headers of a request of ours; `span` is its name in the server's trace."""
        own = {
            "X-Request-Id": self.request,
            "traceparent": f"00-{self.trace}-{span}-01",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        return [*self.headers, *((name.encode(), value.encode()) for name, value in own.items())]


class Lost(Exception):
    """A server cannot answer, and the client has not seen any part of an answer yet."""


@dataclass
class Journey:
    """A request on its way."""

    path: str
    body: Body
    ids: Ids
    send: Send
    sent: str | None = None  # the trace event of the newest request to a server
    deaths: int = 0  # of servers that had it
    refusal: Response | None = None  # of the last server that cannot take it now
    refused_by: set[Server] = field(default_factory=set)

    def check(self) -> None:
        """Raises APIError if this request may be what kills servers."""
        if self.deaths >= MOST_DEATHS:
            raise unavailable(f"{self.deaths} servers died while they had this request; it is not tried again.")


class Proxy:
    """The routes that generate text, as an ASGI application."""

    def __init__(self, servers: Servers, metrics: RouterMetrics, most: int, prefill_seconds: float) -> None:
        self._servers, self._metrics, self._most = servers, metrics, most
        self._prefill_seconds = prefill_seconds
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, until its client leaves. Raises APIError."""
        if self.running >= self._most:
            text = f"{self.running} requests are being answered (--max-concurrent-requests); send this one again later."
            raise APIError(429, "RateLimitError", text, headers={"Retry-After": "1"})
        request = Request(scope, receive)
        ids, path = Ids.of(request.headers), scope["state"]["path"]
        scope["state"]["req"] = ids.request
        self.running += 1
        try:
            body = Body(await request.body())
            if trace.on:
                trace.emit("router.received", req=ids.request, path=path, trace_id=ids.trace, stream=body.is_stream)
            await run_until_disconnect(receive, self._answer(Journey(path, body, ids, send)))
        except (ClientGoneError, ClientDisconnect):
            pass  # whoever worked for it has noticed: their connections are closed
        finally:
            self.running -= 1

    async def _answer(self, journey: Journey) -> None:
        """Raises APIError if nobody can."""
        params, is_prefilled = None, False
        for _ in range(len(self._servers.all) + MOST_DEATHS):
            if not is_prefilled and self._servers.choose("decode", journey.refused_by) is not None:
                params, is_prefilled = await self._prefill(journey), True
            if (server := self._servers.for_answer(journey.refused_by)) is None:
                break
            deaths = journey.deaths
            try:
                await self._decode(server, journey, params if server.role == "decode" else None)
                return
            except Lost:
                journey.check()
                is_prefilled = is_prefilled and deaths == journey.deaths  # who died may have fetched the blocks
        if journey.refusal is None:
            raise APIError(503, "ServiceUnavailableError", "No server can be reached.", headers={"Retry-After": "1"})
        await journey.refusal({"type": "http"}, _nothing, journey.send)

    # The prompt

    async def _prefill(self, journey: Journey) -> msgspec.Raw | None:
        """Where the prompt's blocks are; None if a decode server is to compute it. Raises APIError."""
        tried: set[Server] = set()
        while journey.body.pays and (server := self._servers.choose("prefill", tried)) is not None:
            tried.add(server)
            try:
                async with (
                    asyncio.timeout(self._prefill_seconds),
                    self._asked(server, journey, journey.body.for_prefill(), self._prefill_seconds) as answer,
                ):
                    data = await read(answer, MOST_BYTES)
            except GONE as error:
                await self._is_lost(server, journey, error)
                journey.check()
                continue
            params = params_in(data) if answer.status_code == 200 else None
            self._count(server, journey, answer.status_code, params is not None)
            if answer.status_code != 503:  # what this one refuses, another one would too
                return params
        return None

    # The answer

    async def _decode(self, server: Server, journey: Journey, params: msgspec.Raw | None) -> None:
        """Pass the answer on. Raises Lost."""
        try:
            async with self._asked(server, journey, journey.body.for_answer(params)) as answer:
                if answer.status_code == 503:  # it is full, starts, or ends: perhaps another one can
                    data = await read(answer, MOST_BYTES)
                    self._count(server, journey, 503, False)
                    journey.refusal = Response(data, 503, _passed_back(answer))
                    journey.refused_by.add(server)
                    raise Lost
                await self._pass_on(server, answer, journey)
        except GONE as error:
            await self._is_lost(server, journey, error)
            raise Lost from None

    async def _pass_on(self, server: Server, answer: httpx.Response, journey: Journey) -> None:
        """As it comes, so that no answer is too long for this process; its header is sent with its first piece. A stream that
        breaks between two events ends with an error; otherwise the connection closes before the answer has ended, so that nobody takes the part
        for the whole."""
        begun, last, send = False, b"", journey.send
        start = {"type": "http.response.start", "status": answer.status_code, "headers": _passed_back(answer).raw}
        try:
            async for piece in answer.aiter_raw():
                if not begun:
                    begun = True
                    await send(start)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = (last + piece[-2:])[-2:]
        except GONE as error:
            if not begun:
                raise
            await self._is_lost(server, journey, error)
            if last == b"\n\n" and answer.headers.get("content-type", "").startswith("text/event-stream"):
                words = error_json(unavailable("The server ended while it answered this request."))
                end = f"data: {words}\n\ndata: [DONE]\n\n".encode()
                await send({"type": "http.response.body", "body": end, "more_body": False})
            return
        if not begun:
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._count(server, journey, answer.status_code, False)

    # Both

    @asynccontextmanager
    async def _asked(
        self, server: Server, journey: Journey, data: bytes, seconds: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A server's answer, of which the header has come. Raises what GONE names."""
        span, ids = secrets.token_hex(8), journey.ids
        if trace.on:
            journey.sent = trace.emit(
                "router.sent",
                req=ids.request,
                role=server.role,
                url=server.url,
                span=span,
                busy=server.busy,
                bytes=len(data),
            )
        client = self._servers.client
        timeout = (
            client.timeout if seconds is None else httpx.Timeout(seconds, connect=client.timeout.connect, pool=None)
        )
        headers = ids.for_server(span)
        request = client.build_request(
            "POST", server.url + journey.path, content=data, headers=headers, timeout=timeout
        )
        with server.at_work():
            answer = await client.send(request, stream=True)
            try:
                check(answer)
                yield answer
            finally:
                await answer.aclose()

    def _count(self, server: Server, journey: Journey, status: int, is_kept: bool, message: str = "") -> None:
        self._metrics.answered(server, str(status) if status else "lost")
        if trace.on:
            req, role = journey.ids.request, server.role
            trace.emit(
                "router.answered", req=req, cause=journey.sent, role=role, url=server.url, status=status, is_kept=is_kept, message=message,
            )  # fmt: skip

    async def _is_lost(self, server: Server, journey: Journey, error: Exception) -> None:
        """Is the server gone, or only this connection?"""
        self._count(server, journey, 0, False, reason(error))
        journey.deaths += not isinstance(error, httpx.ConnectError | httpx.TimeoutException | TimeoutError)
        await self._servers.look(server)


def check(answer: httpx.Response) -> None:
    """Can a client be told its status and headers? Raises RemoteProtocolError if not: it is as broken as one that is not HTTP at all."""
    values = b"".join(value for _, value in _passed_back(answer).raw)
    if not 200 <= answer.status_code < 600 or not _CONTROLS.isdisjoint(values):
        raise httpx.RemoteProtocolError("an invalid status or header")


async def read(answer: httpx.Response, most: int) -> bytes:
    """The body of an answer; nothing if it is longer than `most`. It is not unpacked: few packed bytes may hold any number of plain ones."""
    data = bytearray()
    async for piece in answer.aiter_raw():
        data += piece
        if len(data) > most:
            return b""
    return bytes(data)


def _passed_back(answer: httpx.Response) -> httpx.Headers:
    return httpx.Headers([each for each in answer.headers.raw if each[0].lower().decode("latin-1") in PASSED_BACK])


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
