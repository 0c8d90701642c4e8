"""The way of a request: its prompt to a prefill server, the rest to a decode server, whose answer passes byte for byte.

A client sees a decode server's answers only. Whatever a prefill server refuses, or dies of, is left to the decode server, which computes the prompt
itself. A server that dies before the answer has begun costs time: the request goes on elsewhere, once. A stream that had begun ends with an
error.
"""

from __future__ import annotations

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
PASSED_BACK = ("content-type", "retry-after", "www-authenticate", "cache-control", "x-accel-buffering", "x-request-id")
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
                async with self._asked(server, journey, journey.body.for_prefill(), self._prefill_seconds) as answer:
                    data = await answer.aread()
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
                if journey.body.is_stream and answer.status_code == 200:
                    await self._pass_on(server, answer, journey)
                else:
                    await self._pass_whole(server, answer, journey)
        except GONE as error:
            await self._is_lost(server, journey, error)
            raise Lost from None

    async def _pass_whole(self, server: Server, answer: httpx.Response, journey: Journey) -> None:
        data = await answer.aread()
        self._count(server, journey, answer.status_code, False)
        response = Response(data, answer.status_code, _passed_back(answer))
        if answer.status_code == 503:  # it is full, starts, or ends: perhaps another one can
            journey.refusal = response
            journey.refused_by.add(server)
            raise Lost
        await response({"type": "http"}, _nothing, journey.send)

    async def _pass_on(self, server: Server, answer: httpx.Response, journey: Journey) -> None:
        """A stream, as it comes; its header is sent with its first piece."""
        begun, send = False, journey.send
        headers = [(name.encode(), value.encode("latin-1")) for name, value in _passed_back(answer).items()]
        try:
            async for piece in answer.aiter_raw():
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except GONE as error:
            if not begun:
                raise
            await self._is_lost(server, journey, error)
            words = error_json(unavailable("The server ended while it answered this request."))
            end = f"data: {words}\n\ndata: [DONE]\n\n".encode()
            await send({"type": "http.response.body", "body": end, "more_body": False})
            return
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._count(server, journey, 200, False)

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
        journey.deaths += not isinstance(error, httpx.ConnectError | httpx.TimeoutException)
        await self._servers.look(server)


def _passed_back(answer: httpx.Response) -> dict[str, str]:
    return {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
