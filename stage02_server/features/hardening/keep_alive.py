"""`--sse-keep-alive-interval`: comments in a stream while the model is silent (vllm/entrypoints/openai/api_server.py)."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.middleware import route_path

COMMENT = b": keep-alive\n\n"  # clients of server-sent events skip lines that begin with a colon
ENDLESS = "/v1/engine/events"  # is silent while nothing runs, and nobody waits for it to end


class KeepAliveMiddleware:
    """Puts a comment into a stream of events that has been silent for the interval: proxies end silent connections."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app, self._seconds = app, args.sse_keep_alive_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) == ENDLESS:
            await self._app(scope, receive, send)
            return
        stream = _KeptAlive(send, self._seconds)
        try:
            await self._app(scope, receive, stream.send)
        finally:
            await stream.stop()


class _KeptAlive:
    """What one answer sends, and the task that fills its silences."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._sending = asyncio.Lock()
        self._spoke = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send what the application sends."""
        self._spoke.set()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self.stop()
        async with self._sending:
            await self._send(message)
        self._spoke.set()
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith("text/event-stream"):
                self._task = asyncio.create_task(self._fill_silences())

    async def _fill_silences(self) -> None:
        comment = {"type": "http.response.body", "body": COMMENT, "more_body": True}
        while True:
            self._spoke.clear()
            try:
                async with asyncio.timeout(self._seconds):  # wait_for may swallow the cancellation in Python 3.11
                    await self._spoke.wait()
            except TimeoutError:
                if not self._sending.locked():  # else the client is still busy reading
                    async with self._sending:
                        await self._send(comment)

    async def stop(self) -> None:
        """End the comments."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
