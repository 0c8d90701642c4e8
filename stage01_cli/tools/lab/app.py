"""The small server of the laboratory: one page, and `POST /simulate`.

It answers a browser on this machine and nobody else: a page of another site must not reach it, not even by a name that it has
pointed to 127.0.0.1. So the Host must be an address or localhost, and the Origin, if there is one, this server.

Code that is written into the page runs with the rights of whoever started the server, so it is taken from nobody else: from this machine only, and with
the key that stands in the link that was printed. Other users of the machine reach the port, but do not have the key.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
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


KEY_HEADER = "X-Lab-Key"


def make_app(
    host: str, scheduler_cls: str | None = None, limit_seconds: float = LIMIT_SECONDS, key: str | None = None
) -> Starlette:
    """The application; `host` is the name or address that it is bound to. With a `key` it runs code that is sent with it."""
    reference = Simulator(None, limit_seconds)  # a process that no class of the learner's has been in
    own = reference if scheduler_cls is None else Simulator(scheduler_cls, limit_seconds)
    written = Simulator(None, limit_seconds, shut_in=True)
    page, policy = build_page({"mode": "server", "own": scheduler_cls, "editor": key is not None})
    policy += "; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def run_simulation(request: Request) -> Response:
        try:
            question = await _question(request)
            if question["code"] is not None:
                _check_key(request, key)
        except _Refused as refused:
            return _problem(refused.status, str(refused))
        simulator = written if question["code"] is not None else own if question["own"] else reference
        answer = await simulator.ask(json.dumps(question).encode())
        return Response(answer, media_type="application/json", headers={"X-Content-Type-Options": "nosniff"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for simulator in (reference, own, written):
            await simulator.close()

    routes = [Route("/", show_page), Route("/simulate", run_simulation, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(OwnPagesOnly, host=host)], lifespan=lifespan)


class _Refused(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def _problem(status: int, sentence: str) -> Response:
    return JSONResponse({"problem": sentence}, status)


def _check_key(request: Request, key: str | None) -> None:
    if key is None:
        raise _Refused(403, "This server takes no code: it does not listen on this machine alone.")
    if not secrets.compare_digest(request.headers.get(KEY_HEADER, "").encode(), key.encode()):
        raise _Refused(403, "Code is taken with the key only: open the link that `stages lab` printed.")


async def _question(request: Request) -> dict[str, Any]:
    """What is asked: `scenario`, whether of the `own` class, and the `code` of one or None. A form of another page can send no JSON without being asked first, so nothing else is accepted."""
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
            code = question.get("code")
            if not isinstance(code, str | None):
                raise _Refused(400, "The code must be a text.")
            return {"scenario": question.get("scenario"), "own": question.get("own") is True, "code": code}
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
