"""Layers around every request that flags switch on (vllm/entrypoints/launchers/app.py, build_app).

api_server.py lists all layers in their order.
"""

from __future__ import annotations

import importlib
import inspect
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.middleware import ACCEPTED_ID
from stage03_engine.errors import ConfigError


class RootPathMiddleware:
    """`--root-path`: routes also match after this prefix, which a reverse proxy may leave in the path."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app, self._root_path = app, (args.root_path or "").rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root_path:
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class RequestIdHeaderMiddleware:
    """Every answer repeats the request's X-Request-Id, or has a random one if that is not usable."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not ACCEPTED_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
            MutableHeaders(scope=scope)["x-request-id"] = request_id  # the id of the answer follows it

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class OwnMiddleware:
    """`--middleware`: the user's own layers; the last one is outermost. Raises ConfigError for one that cannot be used."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        for path in args.middleware:
            found = _import(path)
            try:
                app = found(app) if isinstance(found, type) else BaseHTTPMiddleware(app, dispatch=found)
            except Exception as error:  # it is the user's code
                raise ConfigError(f"--middleware {path}: {type(error).__name__}: {error}") from error
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class AllowedOriginsMiddleware(CORSMiddleware):
    """`--allowed-origins` and related flags: which web sites may call this server."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        super().__init__(
            app, allow_origins=args.allowed_origins, allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods, allow_headers=args.allowed_headers,
        )  # fmt: skip


def _import(path: str) -> Any:
    """`module.name`, as in vLLM, or `module:name`: an ASGI middleware class, or a coroutine function (request, call_next)."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--middleware {path}: {error}; give module.name of something that Python can import"
        ) from error
    if not (isinstance(found, type) or inspect.iscoroutinefunction(found)):
        raise ConfigError(f"--middleware {path}: this is neither a class nor a coroutine function")
    return found
