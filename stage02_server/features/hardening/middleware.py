"""Layers around every request that flags ask for (vllm/entrypoints/openai/api_server.py, build_app).

From the outside in: ids in the header, the gate and trace of every request (middleware.py), `--middleware`, CORS, the key, the
limit of the body. A layer that is added later lies further out.
"""

from __future__ import annotations

import importlib
import inspect
import uuid
from typing import Any, cast

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.authentication import AuthenticationMiddleware
from stage02_server.features.hardening.request_limits import BodyLimitMiddleware
from stage02_server.middleware import ACCEPTED_ID
from stage03_engine.errors import ConfigError


class RequestIdHeaderMiddleware:
    """Every answer says in X-Request-Id what the request said there, or a random id if it said nothing usable."""

    def __init__(self, app: ASGIApp) -> None:
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


def add_inner_middleware(app: FastAPI, args: FrontendArgs) -> None:
    """What lies inside of the gate. Raises ConfigError for a middleware that cannot be had."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=args.max_request_bytes)
    if args.api_key:
        app.add_middleware(AuthenticationMiddleware, api_keys=args.api_key)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
        )
    for path in args.middleware or ():
        found = _import(path)
        if isinstance(found, type):
            app.add_middleware(cast(Any, found))
        else:
            app.middleware("http")(found)


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
