"""The router's HTTP side: its routes, the layers that bound what a client can do, and its start and end."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stage02_server.api_server import LAYERS, StopSignals, create_server_socket, run_loop
from stage02_server.errors import add_exception_handlers, error_object, unavailable
from stage02_server.features.hardening.connection import uvicorn_settings
from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.hardening.process import prepare
from stage02_server.features.router.command import RouterFlags
from stage02_server.features.router.metrics import RouterMetrics
from stage02_server.features.router.proxy import GONE, MOST_BYTES, Proxy, check, passed_on, read
from stage02_server.features.router.servers import Servers
from stage02_server.launcher import Server
from stage02_server.middleware import route_path
from stage03_engine.plugins import parts

logger = logging.getLogger(__name__)
MODELS_SECONDS = 10.0
PATHS = ("/v1/completions", "/v1/chat/completions")
_COUNTS_ANSWERS = "answers_in_flight"  # a layer that counts for an engine


class StateLayer:
    """Outermost: what errors and the other layers look for in a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["path"] = route_path(scope)
        await self._app(scope, receive, send)


def build_app(servers: Servers, flags: RouterFlags, limits: HardeningFlags) -> Starlette:
    """The routes, behind the layers of a server that need no engine. Raises ConfigError."""
    metrics = RouterMetrics(servers)
    proxy = Proxy(servers, metrics, flags.max_concurrent_requests, flags.prefill_timeout_secs)

    async def show_health(request: Request) -> Response:
        if servers.for_answer() is not None:
            return Response()
        states = {server.url: bool(server.is_up) for server in servers.all}
        return JSONResponse(error_object(unavailable("No server can be reached.")) | {"servers": states}, 503)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def show_models(request: Request) -> Response:
        if (server := servers.for_answer()) is None:
            raise unavailable("No server can be reached.")
        try:
            headers = [*passed_on(request.headers), (b"Accept-Encoding", b"identity")]
            async with (
                asyncio.timeout(MODELS_SECONDS),
                servers.client.stream("GET", server.url + "/v1/models", headers=headers) as found,
            ):
                check(found)
                return Response(await read(found, MOST_BYTES), found.status_code, media_type="application/json")
        except GONE:
            await servers.look(server)
            raise unavailable("The server ended while it answered this request.") from None

    routes = [
        *(Route(path, proxy, methods=["POST"]) for path in PATHS),
        Route("/v1/models", show_models), Route("/health", show_health), Route("/metrics", show_metrics),
    ]  # fmt: skip

    async def say_what_there_is(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(
            404, f"The router answers at {', '.join(each.path for each in routes)}; ask a server itself for all else."
        )

    app = Starlette(routes=routes, middleware=[Middleware(StateLayer), *layers_of(limits)])
    app.router.default = say_what_there_is
    add_exception_handlers(app)  # type: ignore[arg-type]
    app.middleware_stack = app.build_middleware_stack()  # now, because a user's layer may fail
    return app


def layers_of(limits: HardeningFlags) -> list[Middleware]:
    """Those of a server that need no engine and are switched on, the outermost first."""
    layers = [
        part
        for place in LAYERS
        for part in parts("middleware", place)
        if part.feature == "hardening" and part.is_on(limits)
    ]
    kinds: list[Any] = [part.load() for part in layers if not part.module.endswith(_COUNTS_ANSWERS)]
    return [Middleware(kind, limits) for kind in kinds]


def serve(flags: RouterFlags, limits: HardeningFlags) -> int:
    """Route until a signal ends it; returns the exit code. Raises StagesError if it cannot start."""
    prepare(limits)
    try:
        return run_loop(run_router(flags, limits))
    except KeyboardInterrupt:  # Ctrl-C in the moment before the event loop listens to signals
        return 0


async def run_router(flags: RouterFlags, limits: HardeningFlags) -> int:
    """Bind the port, look at the servers, and route. Raises StagesError."""
    stop = StopSignals()
    with stop.installed():
        sock, address = _bind(flags, limits)
        servers = Servers(flags.prefill, flags.decode, flags.request_timeout_secs)
        with sock:
            async with servers.client:
                app = build_app(servers, flags, limits)
                await asyncio.gather(*map(servers.look, servers.all))
                config = uvicorn.Config(
                    app, server_header=False, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=flags.shutdown_timeout,
                    **uvicorn_settings(limits),
                )  # fmt: skip
                up = sum(bool(each.is_up) for each in servers.all)
                said = f"Routing on {address}: {up} of {len(servers.all)} servers are ready."
                for text in warnings(flags, limits):
                    logger.warning(text)
                await _until_stopped(Server(config, lambda: logger.info(said)), sock, servers, flags, stop)
    logger.info("Stopped.")
    return 0


def _bind(flags: RouterFlags, limits: HardeningFlags) -> tuple[socket.socket, str]:
    if limits.uds is not None:
        from stage02_server.features.hardening.unix_socket import create_server_unix_socket

        address, sock = create_server_unix_socket(limits)
        return sock, address
    sock = create_server_socket(flags.host or "", flags.port)
    scheme, host, port = "https" if limits.ssl_certfile else "http", flags.host or "0.0.0.0", sock.getsockname()[1]
    return sock, f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def warnings(flags: RouterFlags, limits: HardeningFlags) -> list[str]:
    """What is to be said at the start."""
    if flags.host not in (None, "0.0.0.0", "::") or not limits.warnings():
        return []
    return [
        "Everybody who reaches this machine can use this router, as far as its servers ask for no key: it listens on all interfaces (--host) and asks "
        "for none itself (--api-key). With --host 127.0.0.1 it is for this machine alone."
    ]


async def _until_stopped(
    server: Server, sock: socket.socket, servers: Servers, flags: RouterFlags, stop: StopSignals
) -> None:
    """Two signals: the first lets running requests finish, the second does not."""
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(servers.watch(flags.health_check_interval_secs))
    first, second = asyncio.create_task(stop.first.wait()), asyncio.create_task(stop.second.wait())
    try:
        await asyncio.wait({serving, first, watching}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait({serving, second}, return_when=asyncio.FIRST_COMPLETED)
        server.force_exit = True
        await serving
        if watching.done():
            watching.result()
    finally:
        for task in (watching, first, second):
            task.cancel()
