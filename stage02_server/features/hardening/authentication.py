"""Who may ask: `--api-key` (vllm/entrypoints/serve/middleware/authenticate.py, AuthenticationMiddleware).

vLLM closes what begins with /v1 and leaves all else open. Here a short list is open and everything else is closed,
so that a new route is not left open by oversight.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.errors import APIError, error_response
from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.middleware import TENANT, route_path

OPEN_PATHS = frozenset(
    [
        "/", "/health", "/metrics", "/version", "/load", "/openapi.json", "/docs", "/redoc",
        "/favicon.ico", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/redoc.standalone.js",
    ]
)  # fmt: skip
"""What needs no key: the state of the server, and pages that hold nothing secret."""


class AuthenticationMiddleware:
    """Refuses with a 401 what is not on the open list and has none of the keys, as `Authorization: Bearer KEY` or, as Anthropic's
    clients send it, as `x-api-key: KEY`. Of several keys each is a tenant (tenants.py), so a request that holds two of them
    is a 400: it does not say whose it is."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(args.api_key or ())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenants = self._keys_of(scope)
        if len(tenants) != 1:
            await self._refuse(scope, receive, send, bool(tenants))
            return
        before = TENANT.set(tenants.pop() if len(self._digests) > 1 else None)
        try:
            await self._app(scope, receive, send)
        finally:
            TENANT.reset(before)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, several: bool) -> None:
        text = "Send a valid API key, as the header Authorization: Bearer KEY or x-api-key: KEY."
        error = APIError(401, "AuthenticationError", text)
        if several:
            text = "Send one API key: the headers Authorization and x-api-key hold two different ones."
            error = APIError(400, "BadRequestError", text)
        response = error_response(scope, error)
        if not several:
            response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _keys_of(self, scope: Scope) -> set[int]:
        """The numbers of the keys that the request holds. Compares digests, with every key and each in constant time: how
        long it takes says nothing about a key."""
        headers = Headers(scope=scope)
        bearers, keys = headers.getlist("authorization"), headers.getlist("x-api-key")
        scheme, _, bearer = bearers[0].partition(" ") if len(bearers) == 1 else ("", "", "")
        by_bearer, by_key = self._numbers_of(bearer), self._numbers_of(keys[0] if keys else "")
        return (by_bearer if scheme.lower() == "bearer" else set()) | (by_key if len(keys) == 1 else set())

    def _numbers_of(self, key: str) -> set[int]:
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()  # Headers decodes the bytes as Latin-1
        equal = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever is equal
        return {number for number, same in enumerate(equal) if same}
