"""Serve an application until a signal comes or the engine dies (vllm/entrypoints/launchers/launcher.py, serve_http).

HTTP is up while the engine loads and while the last requests finish; `lifecycle.py` has the states that /health reports.

first SIGTERM or SIGINT    new requests are refused, running ones get `--shutdown-timeout` seconds, exit code 0
second signal              running requests end now, with an error; exit code 0
the engine dies            running requests have failed already; /health says 503 for a moment; exit code 1
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from stage02_server.api_server import Services, StopRequested, StopSignals
from stage03_engine.args.log import seconds_since_start
from stage03_engine.plugins import find
from stagetrace import trace

logger = logging.getLogger(__name__)
DEATH_LINGER_SECONDS = 2.0  # long enough for a load balancer's next look at /health
LAST_WORDS_SECONDS = 1.0  # for the errors of cut requests to reach their clients


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which `StopSignals` does. uvicorn would also re-raise every caught signal when
    it is done, and so end the process with that signal instead of exit code 0."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # inherited; frees the port at the end
        self._on_listening()


async def serve_http(
    app: FastAPI, sock: socket.socket, address: str, stop: StopSignals, connection: dict[str, Any]
) -> int:
    """Accept connections on `sock`, start the engine, and serve until a signal or the engine's death; returns the exit code.

    `connection` holds more uvicorn settings. Raises OSError if it cannot listen, StagesError if the engine cannot
    start, StopRequested if a signal came first.
    """
    services: Services = app.state.services
    engine, lifecycle = services.engine, services.lifecycle
    listening = asyncio.Event()

    def on_listening() -> None:
        listening.set()
        lifecycle.announce()
        logger.info("HTTP is up at %s while the model loads.", address)

    # log_config None: uvicorn's records go where all others go
    config = uvicorn.Config(app, server_header=False, ws="none", log_config=None, **connection)
    server = Server(config, on_listening)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await _unless_http_fails(serving, listening.wait())
        await _unless_http_fails(serving, stop.unless_stopped(engine.start()))
    except BaseException as error:
        lifecycle.end(failed=not isinstance(error, StopRequested))
        await _close(server, serving)
        raise
    if trace.on:
        trace.emit("server.listening", address=address)
    lifecycle.announce()
    logger.info("Ready after %.1f s. Serving %s on %s", seconds_since_start(), services.models.names[0], address)
    if say_where := find("server", "link"):
        say_where(address)
    await _until_the_end(services, server, serving, stop)
    lifecycle.end(failed=engine.errored)
    return 1 if engine.errored else 0


async def _unless_http_fails(serving: asyncio.Task[None], work: Coroutine[Any, Any, object]) -> None:
    """Wait for `work` while HTTP is up. Raises the error of whichever fails."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({serving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            serving.result()  # raises, since nothing asked it to end
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _until_the_end(
    services: Services, server: uvicorn.Server, serving: asyncio.Task[None], stop: StopSignals
) -> None:
    """Wait until a signal comes, the engine dies or HTTP fails; returns when all have an answer and HTTP has ended."""
    died = asyncio.create_task(services.engine.wait_dead())
    stopped = asyncio.create_task(stop.first.wait())
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            logger.error("%s The server stops in %.0f s.", died.result(), DEATH_LINGER_SECONDS)
            services.lifecycle.announce()
            await asyncio.wait({stopped}, timeout=DEATH_LINGER_SECONDS)
        await _drain(services, server, serving, stop)
        await _close(server, serving)
    finally:
        died.cancel()
        stopped.cancel()


async def _drain(services: Services, server: uvicorn.Server, serving: asyncio.Task[None], stop: StopSignals) -> None:
    """Let running requests finish, then cut what is left. The port stays open meanwhile: /health says `draining`."""
    gate, timeout = services.gate, services.args.shutdown_timeout
    gate.draining = True
    if stop.name and not serving.done():
        if trace.on:
            trace.emit("server.draining", signal=stop.name)
        services.lifecycle.announce()
        logger.info("%s: finishing %d requests, for at most %d s.", stop.name, len(gate.running), timeout)
    asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, gate.end_endless)
    again, idle = asyncio.create_task(stop.second.wait()), asyncio.create_task(gate.idle.wait())
    deadline = time.monotonic() + timeout
    await asyncio.wait({serving, again, idle}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if not gate.running:  # all answers are made, though a slow client may not have read its own yet
        gate.expire()
        server.should_exit = True
        left = max(0.0, deadline - time.monotonic())
        await asyncio.wait({serving, again}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    idle.cancel()
    if gate.running:
        logger.warning("Ending %d requests that are not finished.", len(gate.running))
        gate.expire()


async def _close(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """Close the port and all connections. Raises what made HTTP fail, if it did."""
    server.should_exit = True
    await asyncio.wait({serving}, timeout=LAST_WORDS_SECONDS)
    server.force_exit = True  # a client that does not read must not delay the exit
    await asyncio.wait({serving}, timeout=LAST_WORDS_SECONDS)
    if serving.done():
        serving.result()
    serving.cancel()
