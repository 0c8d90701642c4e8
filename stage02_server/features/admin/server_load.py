"""The number of requests in progress, for `/load` (vllm/entrypoints/serve/utils/api_utils.py, load_aware_call)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.features.admin.manifest import AdminFlags


def is_work(scope: Scope) -> bool:
    """Is this a request for the model? Those have ids of their own."""
    return scope["type"] == "http" and scope["method"] == "POST" and "ids" in scope["state"]


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
