"""The number of requests in progress, for `/load` (vllm/entrypoints/utils.py, load_aware_call)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.features.admin.flags import AdminFlags
from stage02_server.middleware import route_path

WORKING_PATHS = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank",
        "/v2/rerank", "/score", "/rerank", "/pooling", "/classify", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/invocations",
    }
)  # fmt: skip
"""The routes that give a model work."""


def is_work(scope: Scope) -> bool:
    """Is this a request for the model?"""
    return scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) in WORKING_PATHS


class ServerLoad:
    """Counts the HTTP requests for the model that are in progress."""

    def __init__(self) -> None:
        self.in_progress = 0


class ServerLoadMiddleware:
    """Counts requests for the model while they run."""

    def __init__(self, app: ASGIApp, args: AdminFlags) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_work(scope):
            await self._app(scope, receive, send)
            return
        load: ServerLoad = scope["app"].state.server_load
        load.in_progress += 1
        try:
            await self._app(scope, receive, send)
        finally:
            load.in_progress -= 1
