"""What happens to every HTTP request before and after its handler: its id, its trace events, and the shutdown.

vLLM: XRequestIdMiddleware and ScalingMiddleware in vllm/entrypoints/openai/api_server.py. Pure ASGI: Starlette's
BaseHTTPMiddleware would put a queue between a stream and its client.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import error_json, error_response, unavailable
from stage03_engine.plugins import find
from stagetrace import trace
from stagetrace.text import bounded

PREFIX = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
"""Path -> the prefix of its request ids, for the paths that run the model. `app.state.prefixes` also has those of the features, and
`app.state.unchosen_ids` the paths whose ids clients may not choose."""
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
CONNECTION = "stages.connection"  # in a scope's extensions: `abort` ends the connection, `waiting` is how many bytes its client has not read, `transport` asyncio's own
TENANT: ContextVar[int | None] = ContextVar("tenant", default=None)
"""Which of several API keys sent the request that is being served; None with one key, or none."""


def route_path(scope: Scope) -> str:
    """The path that the router matches: decoded, and without the prefix `--root-path`.

    Taken from the request line alone: the header Host must not be able to change it.
    """
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path


@dataclass(frozen=True)
class RequestIds:
    """`response` is what the client sees; the engine's front end knows prompt i of the request as `engine_id(i)`."""

    response: str
    engine: str
    cause: str | None = None  # the trace event of the request's arrival

    def engine_id(self, index: int) -> str:
        """The id of one prompt."""
        return f"{self.engine}-{index}"

    def named(self, request_id: str | None) -> RequestIds:
        """A copy with the id that the body asks for, unless the header chose one. The engine keeps its id, which is
        older than the body."""
        if request_id is None or self.engine != self.response:
            return self
        return replace(self, response=f"{self.response.partition('-')[0]}-{request_id}")


def make_ids(prefix: str, x_request_id: str | None) -> RequestIds:
    """Ids from the header X-Request-Id if it is short and printable, else from a random number.

    Clients may send one id twice at the same time; the engine must not mix them up, so it gets a suffix.
    """
    if x_request_id is not None and ACCEPTED_ID.fullmatch(x_request_id):
        response = prefix + x_request_id
        return RequestIds(response, f"{response}-{uuid.uuid4().hex[:8]}")
    response = prefix + uuid.uuid4().hex
    return RequestIds(response, response)


class RequestGate:
    """Knows the running requests, so that a shutdown can wait for them, or end them."""

    def __init__(self) -> None:
        self.draining = False
        self.expired = False
        self.running: set[asyncio.Task[None]] = set()
        self.background: set[asyncio.Task[None]] = set()  # work that no client waits for; it ends with the server
        self.endless: set[Callable[[], None]] = set()  # each cuts an answer that never ends by itself
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, task: asyncio.Task[None]) -> None:
        """A request starts in this task."""
        self.running.add(task)
        self.idle.clear()

    def leave(self, task: asyncio.Task[None]) -> None:
        """It has ended."""
        self.running.discard(task)
        if not self.running:
            self.idle.set()
            if self.expired:
                self.expire()

    def end_endless(self) -> None:
        """Cut the endless answers that nobody reads; the others have ended by themselves."""
        for cut in list(self.endless):
            cut()

    def expire(self) -> None:
        """Time is up. End every running request, with an error for its client; then the background work that some of them read."""
        self.draining = self.expired = True
        for task in self.running or self.background:
            task.cancel()


class _Answer:
    """Watches what is sent, to know how far the answer is."""

    def __init__(self, send: Send, req: str | None, cause: str | None) -> None:
        self._send, self._req, self._cause = send, req, cause
        self.status = 0
        self.streams = False
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            if trace.on and not self.streams:
                trace.emit("http.response", req=self._req, cause=self._cause, status=self.status)


class RequestMiddleware:
    """The outermost of our own layers around every request."""

    def __init__(self, app: ASGIApp, args: FrontendArgs) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        req, app = None, scope["app"].state
        state = scope.setdefault("state", {})
        path = state["path"] = route_path(scope)
        if path in app.prefixes:
            chosen = None if path in app.unchosen_ids else Headers(scope=scope).get("x-request-id")
            state["ids"] = make_ids(app.prefixes[path], chosen)
            req = state["req"] = state["ids"].engine_id(0)
        cause = None
        if trace.on:
            cause = _trace_arrival(scope, req)
            if "ids" in state:
                state["ids"] = replace(state["ids"], cause=cause)
        answer = _Answer(send, req, cause)
        refusal = app.services.lifecycle.refusal(path)
        if refusal is not None:
            await error_response(scope, refusal)(scope, receive, answer.send)
            return
        await self._run(scope, receive, answer, app.gate)

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer, gate: RequestGate) -> None:
        task = asyncio.current_task()
        assert task is not None
        ids: RequestIds | None = scope["state"].get("ids")
        task.set_name(f"{scope['method']} {bounded(scope['path'])}{' ' + ids.response if ids else ''}")  # for debuggers
        gate.enter(task)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not gate.expired:
                raise
            task.uncancel()
            await _cut(scope, receive, answer)
        finally:
            gate.leave(task)


def _trace_arrival(scope: Scope, req: str | None) -> str | None:
    """Returns the event that the response names as its cause. Called only while the trace is on."""
    trace_id, parent_id = None, None
    values = Headers(scope=scope).getlist("traceparent")
    if values and (parse := find("server", "trace_context")) is not None:
        trace_id, parent_id = parse(values)
    method, path = scope["method"], bounded(scope["path"])
    if trace.on:
        return trace.emit("http.request", req=req, method=method, path=path, trace_id=trace_id, parent_id=parent_id)
    return None


async def _cut(scope: Scope, receive: Receive, answer: _Answer) -> None:
    """End an answer that missed the deadline: with a 503, or in a stream with an error event, in the form of its own API if it has one."""
    error = unavailable("The server was shut down before this request was finished.")
    if not answer.status:
        await error_response(scope, error)(scope, receive, answer.send)
    elif answer.streams and not answer.complete:
        own = scope["state"].get("cut")
        last = own(error) if own else f"data: {error_json(error)}\n\ndata: [DONE]\n\n".encode()
        await answer.send({"type": "http.response.body", "body": last, "more_body": False})
