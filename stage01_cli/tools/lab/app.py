"""The small server of the laboratory: one page, and `POST /simulate`.

It answers a browser on this machine and nobody else: a page of another site must not reach it, not even by a name that it has
pointed to 127.0.0.1. So the Host must be an address or localhost, and the Origin, if there is one, this server.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stage01_cli.tools.lab.page import build_page
from stage01_cli.tools.lab.simulator import LIMIT_SECONDS, Simulator

MAX_BODY_BYTES = 1 << 20


def make_app(host: str, scheduler_cls: str | None = None, limit_seconds: float = LIMIT_SECONDS) -> Starlette:
    """The application; `host` is the name or address that it is bound to."""
    simulator = Simulator(scheduler_cls, limit_seconds)
    page, policy = build_page({"mode": "server", "own": scheduler_cls})
    policy += "; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def run_simulation(request: Request) -> Response:
        try:
            body = await _json_body(request)
        except _Refused as refused:
            return _problem(refused.status, str(refused))
        return Response(
            await simulator.ask(body), media_type="application/json", headers={"X-Content-Type-Options": "nosniff"}
        )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await simulator.close()

    routes = [Route("/", show_page), Route("/simulate", run_simulation, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(OwnPagesOnly, host=host)], lifespan=lifespan)


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def _problem(status: int, sentence: str) -> Response:
    return JSONResponse({"problem": sentence}, status)


async def _json_body(request: Request) -> bytes:
    """The body on one line. A form of another page can send no JSON without being asked first, so nothing else is accepted."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _Refused(415, "The body must be application/json.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _Refused(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        question = json.loads(body)
        if isinstance(question, dict):
            return json.dumps({"scenario": question.get("scenario"), "own": question.get("own") is True}).encode()
    except (ValueError, RecursionError):
        raise _Refused(400, "The body is not JSON.") from None
    raise _Refused(400, "The body must be an object with a scenario.")


class OwnPagesOnly:
    """Refuses what does not come from a page of this server."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            host, origin = request.headers.get("host", ""), request.headers.get("origin")
            if not is_own_name(host, self._host):
                await _problem(403, "This server is asked by its address or as localhost only.")(scope, receive, send)
                return
            if origin is not None and origin != f"http://{host}":
                await _problem(403, "Only the page of this server may ask it.")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_own_name(host: str, bound: str) -> bool:
    """Does a Host header name this server in a way that no other site can arrange: localhost, an address, or what it was bound to?"""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", bound.lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
