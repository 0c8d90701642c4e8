"""Several API servers in front of one engine, or of several (vllm/entrypoints/cli/serve.py, run_multi_api_server).

This process binds the port, starts the engine and the API servers, and waits. It serves no request itself. The servers accept
connections from one socket: an idle server takes the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from stage02_server.api_server import StopSignals, own_client, prepare_process, setup_server
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.api_servers.engines import Engines
from stage02_server.features.api_servers.server_process import ApiServerProcess
from stage02_server.features.api_servers.this_server import Start
from stage03_engine.args.cpu import find_cores
from stage03_engine.args.log import announce
from stage03_engine.args.processes import private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.frontend.features.shared_engine import AllConnected, Connected, EngineStalled, Order, Report, Stop
from stagetrace import trace

logger = logging.getLogger(__name__)
END_SECONDS = 10.0  # for an API server to end, beyond the time that its requests get


def run_multi_api_server(config: VllmConfig, args: FrontendArgs) -> int:
    """Run the servers until a signal ends them; returns the exit code. Raises StagesError if they cannot start."""
    prepare_process(args)
    try:
        return asyncio.run(_launch(config, args))
    except KeyboardInterrupt:  # Ctrl-C in the moment before the event loop listens to signals
        return 0


async def _launch(config: VllmConfig, args: FrontendArgs) -> int:
    stop = StopSignals()
    with stop.installed():
        address, sock = setup_server(args, "https" if getattr(args, "ssl_certfile", None) else "http")
        announce(config, args)
        with sock:
            launcher = Launcher(with_front_ends(config, args), without_store(args))
            try:
                exit_code = await launcher.run(address, sock.fileno(), stop)
            finally:
                launcher.shutdown()
    if trace.on:
        trace.emit("server.stopped", exit_code=exit_code)
        trace.flush()
    logger.info("Stopped.")
    return exit_code


def with_front_ends(config: VllmConfig, args: FrontendArgs) -> VllmConfig:
    """The settings of an engine with as many front ends as there are API servers. Raises ConfigError."""
    count, cores = args.api_server_count, find_cores()
    parallel = getattr(config, "data_parallel_config", None)
    for flag in ("data_parallel_rank", "data_parallel_hybrid_lb"):
        if getattr(parallel, flag, None) not in (None, False):
            raise ConfigError(
                f"{flag} needs api_server_count 1, not {count}: your load balancer divides the requests between servers"
            )
    if getattr(parallel, "num_elsewhere", 0):
        raise ConfigError(
            f"engines on other machines need api_server_count 1, not {count}: they work for one API server"
        )
    if count > cores.usable:
        logger.warning("%d API servers share %s: more of them than cores make nothing faster.", count, cores)
    if own_client(args) is not None:  # each server has its own engine
        return config
    several = replace(config.front_ends, num_front_ends=count)
    return replace(config, front_ends=several)  # type: ignore[call-arg]


def num_engines(config: VllmConfig) -> int:
    """How many engines the settings ask for."""
    return getattr(getattr(config, "data_parallel_config", None), "data_parallel_size", 1)


def without_store(args: FrontendArgs) -> FrontendArgs:
    """No server stores responses: the next request for one may reach another server."""
    if not getattr(args, "max_stored_responses", 0):
        return args
    logger.warning(
        "With %d API servers no response is stored: previous_response_id, GET /v1/responses/{id} and background need "
        "--api-server-count 1. --max-stored-responses 0 silences this warning.",
        args.api_server_count,
    )
    changed: dict[str, Any] = {field.name: 0 for field in fields(args) if field.name == "max_stored_responses"}
    return replace(args, **changed)


class Launcher:
    """Starts the engines and the servers. Like vLLM, it ends all of them when a server ends, or an engine that stays dead. The

    requests of a dead API server die with it; the other servers finish theirs first, in the time that a signal would give them.
    All state belongs to the event loop; the threads that wait for processes hand over what they learn.
    """

    def __init__(self, config: VllmConfig, args: FrontendArgs) -> None:
        self._config, self._args = config, args
        self._loop = asyncio.get_running_loop()
        self._folder = private_folder()  # of the metrics
        self._num_engines = 0 if own_client(args) is not None else num_engines(config)
        self._engines = Engines(config, self._tell_all, self._is_up, self._engines_end)
        self._servers: list[ApiServerProcess] = []
        self._running: set[ApiServerProcess] = set()
        self._connected: Counter[int] = Counter()  # engine -> servers that have a connection to it
        self._is_ending = False
        self._has_failed = False
        self._error: StagesError | None = None  # why nothing could start
        self._ended = asyncio.Event()

    async def run(self, address: str, descriptor: int, stop: StopSignals) -> int:
        """Returns the exit code when all servers have ended. Raises the StagesError of a failed start."""
        self._engines.start(self._num_engines)
        self._start_servers(address, descriptor)
        relay = asyncio.create_task(self._relay(stop))
        try:
            await self._ended.wait()
        finally:
            relay.cancel()
        if self._error is not None:
            raise self._error
        return 1 if self._has_failed else 0

    def shutdown(self) -> None:
        """End and reap every process, and remove the folders."""
        self._is_ending = True
        for server in self._servers:
            server.kill()
        self._engines.shutdown()
        self._folder.remove()

    def _start_servers(self, address: str, descriptor: int) -> None:
        engines, coordinator = self._engines.addresses, self._engines.coordinator_folder
        secret, folder = secrets.token_hex(16), str(self._folder.path)
        for index in range(self._args.api_server_count):
            start = Start(
                index, address, descriptor, self._config, self._args, engines, folder, secret, trace.run_id, coordinator
            )
            server = ApiServerProcess(start)
            self._servers.append(server)
            self._running.add(server)
            server.follow(partial(self._soon, self._reported), partial(self._soon, self._server_ended, server))

    def _soon(self, handle: Callable[..., None], *args: Any) -> None:
        """From any thread: call `handle` on the event loop."""
        with contextlib.suppress(RuntimeError):  # it is closed: all has ended
            self._loop.call_soon_threadsafe(handle, *args)

    def _tell_all(self, order: Order) -> None:
        for server in self._running:
            server.tell(order)

    async def _relay(self, stop: StopSignals) -> None:
        """Pass on the first two signals to every server."""
        await stop.first.wait()
        logger.info("%s: ending %d API servers.", stop.name, len(self._running))
        self._stop(stop.name, self._args.shutdown_timeout + END_SECONDS)
        await stop.second.wait()
        self._stop(stop.name, END_SECONDS)

    def _stop(self, why: str, limit: float) -> None:
        """Ask the servers to end, and kill those that have not after `limit` seconds."""
        self._is_ending = True
        self._tell_all(Stop(why))
        self._loop.call_later(limit, self._kill_rest)

    def _kill_rest(self) -> None:
        for server in self._running:
            logger.error("%s does not end; it is killed.", server.name)
            server.process.kill()

    def _is_up(self) -> bool:
        """Is every server connected to every engine?"""
        return all(self._connected[index] >= len(self._servers) for index in range(self._num_engines))

    def _engines_end(self, why: StagesError) -> None:
        """Running servers report it to their clients for a moment, then end by themselves; those that still start would wait forever."""
        if self._is_up():
            self._has_failed = self._is_ending = True
            self._loop.call_later(END_SECONDS, self._kill_rest)
        elif not self._is_ending:
            self._error = self._error or why
            self._stop("The engine cannot start", END_SECONDS)

    def _reported(self, report: Report) -> None:
        if isinstance(report, Connected):
            self._connected[report.engine] += 1
            if self._connected[report.engine] == len(self._servers):
                self._tell_all(AllConnected(report.engine))
        elif isinstance(report, EngineStalled):
            self._engines.end_stalled(report.engine, report.input_address)
        elif self._error is None:
            self._error = StagesError(report.message)
            self._error.exit_code = report.exit_code

    def _server_ended(self, server: ApiServerProcess, exit_code: int) -> None:
        if trace.on:
            trace.emit("api_server.ended", index=self._servers.index(server), exit_code=exit_code)
        self._running.discard(server)
        self._has_failed = self._has_failed or exit_code != 0
        if not self._is_ending:
            self._has_failed = True
            why = f"{server.name} has ended"
            if self._error is None:
                code, others = exit_code, len(self._running)
                logger.error(
                    "%s unexpectedly (exit code %d); the other %d finish their requests and end.", why, code, others
                )
            self._stop(why, self._args.shutdown_timeout + END_SECONDS)
        if not self._running:
            self._ended.set()
