"""The page at `/`: a playground and a live view of the engine, and the stream of events that the view reads.

vLLM has no counterpart.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator, Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request, Response

from stage02_server.api_server import Services
from stage02_server.errors import APIError, not_found
from stage02_server.middleware import CONNECTION, TENANT, RequestGate
from stage02_server.streaming import EventStreamResponse
from stage03_engine.mixins import is_there

if TYPE_CHECKING:
    from stage03_engine.frontend.features.engine_watch import EngineWatch, WatchQueue

router = APIRouter()
SCRIPTS = (
    "stream.js",
    "key.js",
    "playground.js",
    "state.js",
    "history.js",
    "view.js",
    "curves.js",
    "demo.js",
    "live.js",
)
PAUSE_SECONDS = 0.05  # between two messages: no eye is faster, and a fast engine has hundreds of steps a second
LOOK_UP_SECONDS = 0.5  # how soon an idle stream notices that the server ends


@cache
def build_page() -> tuple[str, str]:
    """The whole page, and the Content-Security-Policy under which it may run its own script and style and call this server,
    and nothing else."""
    folder = files("stage02_server.features.page").joinpath("static")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    icon = (
        "data:image/svg+xml;base64," + base64.b64encode(_icon()).decode()
    )  # part of the page: no second request for it
    picture = base64.b64encode(folder.joinpath("page.webp").read_bytes()).decode()  # for those without scripts
    text = text.replace('"page.webp"', f'"data:image/webp;base64,{picture}"')
    page = text.replace("@@STYLE@@", style).replace("@@SCRIPT@@", script).replace("@@ICON@@", icon)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; connect-src 'self'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


@cache
def _icon() -> bytes:
    return files("stage02_server.features.page").joinpath("static", "favicon.svg").read_bytes()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _page_for(tasks: tuple[str, ...]) -> tuple[bytes, str]:
    page, policy = build_page()
    return page.replace("@@TASKS@@", " ".join(tasks)).encode(), policy


@router.get("/", include_in_schema=False)
async def show_page(raw_request: Request) -> Response:
    """The page itself; it holds nothing secret, so it is open as /health is. It offers what the served model can do."""
    page, policy = _page_for(raw_request.app.state.services.engine.vllm_config.supported_tasks)
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


@router.get("/favicon.ico", include_in_schema=False)
async def show_icon() -> Response:
    """What a browser asks for by itself, without a key, when somebody opens /metrics or /v1/models in it."""
    return Response(_icon(), media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})


@router.get("/v1/engine/events")
async def stream_engine_events(raw_request: Request) -> Response:
    """What the scheduler decides, as server-sent events, one trace event each, its present state first; with several engines
    `dp.engines` says which there are, and `proc` whose an event is. No prompts, no tokens. The engine emits nothing while no client
    listens. With several API keys only with --enable-engine-events."""
    if not is_there("stage03_engine.frontend.features.engine_watch"):
        raise not_found("The live view is not installed: the engine's front end has no engine_watch.")
    from stage03_engine.frontend.features.engine_watch import EngineWatch, WatchError

    services: Services = raw_request.app.state.services
    has_tenants = TENANT.get() is not None
    if has_tenants and not services.args.enable_engine_events:
        raise not_found(
            "The live view shows the requests of all API keys: start the server with --enable-engine-events."
        )
    services.engine.check_health()
    watch = EngineWatch.of(services.engine, hides_ids=has_tenants)
    try:
        queue = await watch.start()
    except WatchError as error:
        raise APIError(409, "ConflictError", str(error)) from error
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    connection = raw_request.scope.get("extensions", {}).get(CONNECTION, {})
    return EventStreamResponse(_events(watch, queue, services.gate, connection.get("abort")), headers=headers)


async def _events(
    watch: EngineWatch, queue: WatchQueue, gate: RequestGate, abort: Callable[[], None] | None
) -> AsyncGenerator[bytes, None]:
    """Everything that waits goes out in one piece. Ends with the engine, and when the server drains: an endless stream
    must not hold it up. `abort` is for a client that does not read and so blocks this coroutine."""
    if abort is not None:
        gate.endless.add(abort)
    try:
        yield b": the scheduler's trace events\n\n"
        while not gate.draining:
            try:
                batch = await asyncio.wait_for(queue.get(), LOOK_UP_SECONDS)
            except TimeoutError:
                continue
            while batch is not None and queue.qsize():
                more = queue.get_nowait()
                batch = None if more is None else batch + more
            if batch is None:
                return
            yield b"".join(b"data: " + line + b"\n\n" for line in batch)
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        if abort is not None:
            gate.endless.discard(abort)
        await watch.stop(queue)


def install(app: FastAPI, services: Services) -> None:
    """Add the page and its events."""
    app.include_router(router)
