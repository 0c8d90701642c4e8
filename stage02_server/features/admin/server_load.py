"""The number of requests in progress, for `/load` and for the bound on the queue (`--max-queue-len`).

Source: vllm/entrypoints/utils.py, load_aware_call. As in vLLM, the queue has no bound unless a flag sets one.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError, error_response
from stage02_server.features.admin.flags import AdminFlags
from stage02_server.middleware import route_path
from stage03_engine.frontend.async_llm import AsyncLLM

WORKING_PATHS = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
        "/v1/rerank", "/v2/rerank", "/score", "/rerank", "/pooling", "/classify", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/generative_scoring", "/invocations",
    }
)  # fmt: skip
"""The routes that give a model work."""


class ServerLoad:
    """Counts the HTTP requests that are in progress. Only called on the event loop, so nothing comes between a count and
    the decision that is based on it."""

    def __init__(self, engine: AsyncLLM, max_queue_len: int | None) -> None:
        self._engine, self._max_queue_len = engine, max_queue_len
        self.in_progress = 0

    @property
    def queue_len(self) -> int:
        """Requests that wait: what the scheduler reported after its last step, or what cannot fit into a step,
        including requests that are still on their way to it."""
        too_many = self.in_progress - self._engine.vllm_config.scheduler_config.max_num_seqs
        return max(0, too_many, self._engine.num_waiting_requests)

    def refusal(self) -> APIError | None:
        """Why one more request is refused now, or None. Asked before the body is read: a refusal costs
        next to nothing, however many there are."""
        limit = self._max_queue_len
        if limit is None or self.queue_len < limit:
            return None
        message = f"The server is overloaded: its queue is full (waiting: {self.queue_len}). Try again later."
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return APIError(429, "RateLimitError", message, headers=headers)


class ServerLoadMiddleware:
    """Counts requests for the model while they run, and refuses those beyond `--max-queue-len`."""

    def __init__(self, app: ASGIApp, args: AdminFlags) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in WORKING_PATHS:
            await self._app(scope, receive, send)
            return
        load: ServerLoad = scope["app"].state.server_load
        refusal = load.refusal()
        if refusal is not None:
            await error_response(scope, refusal)(scope, receive, send)
            return
        load.in_progress += 1
        try:
            await self._app(scope, receive, send)
        finally:
            load.in_progress -= 1
