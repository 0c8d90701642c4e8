"""One of several API servers: a process that the launcher starts (vllm/entrypoints/launchers/api_server/entry.py, run_server_worker).

Standard input is a socket to the launcher. Signals do not reach this process (see `signals_are_ours`); the launcher tells it to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stage02_server.api_server import (
    StopRequested,
    StopSignals,
    build_app,
    build_async_engine_client,
    connection_settings,
    init_app_state,
    prepare_process,
    run_loop,
    run_server_worker,
)
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.api_servers.this_server import Start, is_ready, set_this_server
from stage03_engine.args.log import configure_logging, name_process
from stage03_engine.config import VllmConfig
from stage03_engine.errors import StagesError
from stage03_engine.frontend.features.shared_engine import Alive, Failed, LauncherLink, use_link
from stage03_engine.tracing import open_trace
from stagetrace import trace


def main(index: int) -> int:
    """Serve until the launcher asks for the end, or is gone. Returns the exit code."""
    trace.hold(f"APIServer_{index}")
    link = LauncherLink(_take_standard_input())
    if not (line := link.first_line()):
        return 1
    start = msgspec.json.decode(line, type=Start)
    open_trace(start.config, run_id=start.run_id)
    if trace.on:
        trace.emit("api_server.started", cause=start.cause, index=index)
    name_process(start.name)
    configure_logging(start.name, start.config.observability_config)
    set_this_server(start)
    link.number, link.coordinator = index, None if start.coordinator is None else Path(start.coordinator)
    link.restarts, link.engine_restarts = start.restarts, start.engine_restarts
    use_link(link)
    for number, (inputs, outputs) in enumerate(start.engines):
        link.add_engine(number, inputs, outputs)
    prepare_process(start.args)
    try:
        return run_loop(_serve(start, link))
    except StagesError as error:  # several servers may fail alike: the launcher prints the reason, once
        link.tell(Failed(str(error), error.exit_code))
        return error.exit_code
    finally:
        trace.close()


def _take_standard_input() -> socket.socket:
    """The socket that is standard input, under a number that no child inherits, so that it closes when this process ends."""
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return sock


async def _serve(start: Start, link: LauncherLink) -> int:
    stop, loop = StopSignals(), asyncio.get_running_loop()

    def soon(handle: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends anyway
            loop.call_soon_threadsafe(handle, *args)

    def answer() -> None:
        if is_ready():
            link.tell(Alive())

    link.follow(partial(soon, stop.received), partial(soon, answer), lambda: _leave(start.folder))
    os.set_inheritable(start.descriptor, False)
    with socket.socket(fileno=start.descriptor) as sock:
        try:
            run = _join_others if start.restarts else run_server_worker
            exit_code = await run(start.address, sock, start.config, start.args, stop)
        except StopRequested:
            exit_code = 0
    if trace.on:
        trace.emit("server.stopped", exit_code=exit_code)
    return exit_code


async def _join_others(
    address: str, sock: socket.socket, config: VllmConfig, args: FrontendArgs, stop: StopSignals
) -> int:
    """As `run_server_worker`, but no connection is accepted before the engines are: others serve meanwhile, and would not refuse it."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    async with build_async_engine_client(config, args, registry) as engine:
        app = build_app(args)
        init_app_state(engine, app, args, registry)
        from stage02_server.launcher import serve_http

        await stop.unless_stopped(engine.start())
        return await serve_http(app, sock, address, stop, connection_settings(args))


def _leave(folder: str) -> NoReturn:
    """The launcher is gone, perhaps by kill -9, and cannot clean up any more."""
    trace.close()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
