"""Serve an application until a signal comes or the engine dies (vllm/entrypoints/launcher.py, serve_http).

first SIGTERM or SIGINT    new requests are refused, running ones get `--shutdown-timeout` seconds, exit code 0
second signal              running requests end now, with an error; exit code 0
the engine dies            running requests have failed already; /health says 503 for a moment; exit code 1
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from stage02_server.cli_args import FrontendArgs
from stage02_server.middleware import RequestGate
from stage02_server.request_limits import limited_protocol
from stage02_server.stop_signals import StopSignals
from stage03_engine.frontend.async_llm import AsyncLLM
from stagetrace import trace

logger = logging.getLogger(__name__)
DEATH_LINGER_SECONDS = 2.0  # long enough for a load balancer's next look at /health
LAST_WORDS_SECONDS = 1.0  # for the errors of requests that were cut to reach their clients


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: `StopSignals` has the say. uvicorn would also raise every caught signal again
    when it is done, which under the default handlers ends the process with that signal instead of exit code 0."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


def _config(app: FastAPI, args: FrontendArgs) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(args.h11_max_incomplete_event_size, args.h11_max_header_count),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers or "TLSv1",  # uvicorn's default: OpenSSL's name for a set, not a version of TLS
        server_header=False,
        ws="none",
        log_config=None,  # uvicorn's records go where all others go
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=args.timeout_keep_alive,
    )


async def serve_http(
    app: FastAPI, sock: socket.socket, address: str, engine: AsyncLLM, args: FrontendArgs, stop: StopSignals
) -> int:
    """Accept connections on `sock` until it is time to end; returns the exit code. Raises OSError if it cannot listen."""

    def on_listening() -> None:
        if trace.on:
            trace.emit("server.listening", address=address)
        logger.info("Serving %s on %s", app.state.openai_serving_models.names[0], address)

    server = _Server(_config(app, args), on_listening)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    died = asyncio.create_task(engine.wait_dead())
    stopped = asyncio.create_task(stop.first.wait())
    try:
        await asyncio.wait({serving, died, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            logger.error("%s The server stops in %.0f s.", died.result(), DEATH_LINGER_SECONDS)
            await asyncio.wait({stopped}, timeout=DEATH_LINGER_SECONDS)
        await _end(server, serving, app.state.gate, args.shutdown_timeout, stop)
    finally:
        died.cancel()
        stopped.cancel()
    return 1 if engine.errored else 0


async def _end(
    server: uvicorn.Server, serving: asyncio.Task[None], gate: RequestGate, timeout: float, stop: StopSignals
) -> None:
    """Let running requests finish, then cut what is left. Raises what made the server fail, if it did."""
    gate.draining = True
    server.should_exit = True
    if stop.name and not serving.done():
        if trace.on:
            trace.emit("server.draining", signal=stop.name)
        logger.info("%s: finishing %d requests, for at most %d s.", stop.name, len(gate.running), timeout)
    again = asyncio.create_task(stop.second.wait())
    await asyncio.wait({serving, again}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not serving.done():
        if gate.running:
            logger.warning("Ending %d requests that are not finished.", len(gate.running))
        gate.expire()
        await asyncio.wait({serving}, timeout=LAST_WORDS_SECONDS)
        server.force_exit = True  # a client that does not read must not keep us
        await asyncio.wait({serving}, timeout=LAST_WORDS_SECONDS)
    if serving.done():
        serving.result()
    serving.cancel()
