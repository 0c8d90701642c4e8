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
from typing import TYPE_CHECKING, Any

from stage02_server.api_server import StopSignals, own_client, prepare_process, setup_server
from stage02_server.cli_args import FrontendArgs
from stage02_server.features.api_servers.engines import Engines
from stage02_server.features.api_servers.server_process import ApiServerProcess
from stage02_server.features.api_servers.this_server import Start
from stage03_engine.args.cpu import find_cores
from stage03_engine.args.log import announce
from stage03_engine.args.processes import exit_reason, private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.frontend.features.shared_engine import (
    Alive,
    AllConnected,
    Connected,
    EngineStalled,
    Order,
    Report,
    Stop,
)
from stage03_engine.mixins import load
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.frontend.features.data_parallel.restart import RestartLimit

logger = logging.getLogger(__name__)
STALL_SECONDS = 60.0  # as for one of several engines
QUESTIONS = 4  # that a server leaves unanswered before it counts as halted
START_SECONDS = 600.0  # for a server to become ready once the engines are (vLLM: VLLM_ENGINE_READY_TIMEOUT_S)
RESTART_LIMIT = "stage03_engine.frontend.features.data_parallel.restart:RestartLimit"
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
    several = replace(config, front_ends=replace(config.front_ends, num_front_ends=count))  # type: ignore[call-arg]
    several.claim("client")  # what cannot have several front ends is refused before anything is started
    return several


def num_engines(config: VllmConfig) -> int:
    """How many engines the settings ask for."""
    return getattr(getattr(config, "data_parallel_config", None), "data_parallel_size", 1)


def restart_limit(config: VllmConfig) -> RestartLimit | None:
    """How often dead servers are started again: as often as dead engines, but counted by themselves. None without that feature: never."""
    parallel = getattr(config, "data_parallel_config", None)
    return None if parallel is None else load(RESTART_LIMIT)(parallel.data_parallel_restart)


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
    """Starts the engines and the servers, and starts again those that die, as often as --data-parallel-restart says (vLLM ends all of them).

    The requests of a dead API server die with it. When one stays dead, the other servers finish theirs first, in the time that a signal would
    give them. All state belongs to the event loop; the threads that wait for processes hand over what they learn.
    """

    def __init__(self, config: VllmConfig, args: FrontendArgs) -> None:
        self._config, self._args = config, args
        self._loop = asyncio.get_running_loop()
        self._folder = private_folder()  # of the metrics
        self._num_engines = 0 if own_client(args) is not None else num_engines(config)
        self._is_up = not self._num_engines  # True once every server has been connected to every engine
        self._engines = Engines(config, self._tell_all, lambda: self._is_up, self._engines_end)
        self._limit = restart_limit(config)
        self._used_up = False  # a server was not started again because of that
        self._secret = secrets.token_hex(16)
        self._running: set[ApiServerProcess] = set()
        self._connected: Counter[int] = Counter()  # engine -> servers that have a connection to it
        self._is_ending = False
        self._has_failed = False
        self._error: StagesError | None = None  # why nothing could start
        self._ended = asyncio.Event()

    async def run(self, address: str, descriptor: int, stop: StopSignals) -> int:
        """Returns the exit code when all servers have ended. Raises the StagesError of a failed start."""
        self._engines.start(self._num_engines)
        self._address, self._descriptor = address, descriptor
        for index in range(self._args.api_server_count or 0):
            self._start_server(index)
        tasks = [asyncio.create_task(self._relay(stop)), asyncio.create_task(self._look_for_stalls())]
        try:
            await self._ended.wait()
        finally:
            for task in tasks:
                task.cancel()
        if self._error is not None:
            raise self._error
        return 1 if self._has_failed else 0

    def shutdown(self) -> None:
        """End and reap every process, and remove the folders."""
        self._is_ending = True
        for server in self._running:
            server.kill()
        self._engines.shutdown()
        self._folder.remove()

    def _start_server(self, index: int, restarts: int = 0) -> None:
        """Start the server with this number, on the same socket as all others. Raises OSError."""
        start = Start(
            index, self._address, self._descriptor, self._config, self._args, self._engines.addresses, str(self._folder.path),
            self._secret, trace.run_id, self._engines.coordinator_folder, restarts=restarts,
            engine_restarts=self._engines.num_restarts,
        )  # fmt: skip
        server = ApiServerProcess(start)
        self._running.add(server)
        server.follow(partial(self._soon, self._reported, server), partial(self._soon, self._server_ended, server))
        for order in self._engines.told:
            server.tell(order)

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

    def _engines_end(self, why: StagesError) -> None:
        """Running servers report it to their clients for a moment, then end by themselves; those that still start would wait forever."""
        if self._is_up:
            self._has_failed = self._is_ending = True
            self._loop.call_later(END_SECONDS, self._kill_rest)
        elif not self._is_ending:
            self._error = self._error or why
            self._stop("The engine cannot start", END_SECONDS)

    def _reported(self, server: ApiServerProcess, report: Report) -> None:
        if isinstance(report, Connected):
            self._server_connected(server, report.engine)
        elif isinstance(report, Alive):
            server.unanswered, server.is_ready = 0, True
        elif isinstance(report, EngineStalled):
            self._engines.end_stalled(report.engine, report.input_address)
        elif server.start.restarts:
            server.failed = report.message
        elif self._error is None:
            self._error = StagesError(report.message)
            self._error.exit_code = report.exit_code

    def _server_connected(self, server: ApiServerProcess, engine: int) -> None:
        """At the start all wait for all; one that joins those that serve waits for nobody."""
        if self._is_up:
            return server.tell(AllConnected(engine))
        self._connected[engine] += 1
        if self._connected[engine] == len(self._running):
            self._tell_all(AllConnected(engine))
            self._is_up = all(self._connected[index] == len(self._running) for index in range(self._num_engines))

    def _server_ended(self, server: ApiServerProcess, exit_code: int) -> None:
        if trace.on:
            trace.emit("api_server.ended", index=server.start.index, exit_code=exit_code)
        self._running.discard(server)
        server.forget(str(self._folder.path))
        if self._start_again(server, exit_code):
            return
        self._has_failed = self._has_failed or exit_code != 0
        if not self._is_ending:
            self._has_failed = True
            why = f"{server.name} has ended"
            if self._error is None:
                said, others = self._reason(server, exit_code), len(self._running)
                logger.error("%s unexpectedly (%s); the other %d finish their requests and end.", why, said, others)
            self._stop(why, self._args.shutdown_timeout + END_SECONDS)
        if not self._running:
            self._ended.set()

    def _start_again(self, server: ApiServerProcess, exit_code: int) -> bool:
        """Start a server in the place of one that has ended, unless that was too often. Its clients' requests are aborted by the engines,
        which notice its end themselves."""
        may = self._is_up and not self._is_ending and self._error is None  # else the others could not start either
        if self._limit is None or not may:
            return False
        if not self._limit.take():
            self._used_up = self._limit.total > 0
            return False
        index, restarts = server.start.index, server.start.restarts + 1
        try:
            self._start_server(index, restarts)
        except OSError as error:  # there is no memory for a process, for instance
            server.failed = f"it cannot be started again: {error}"
            return False
        if trace.on:
            trace.emit("api_server.restarted", index=index, restarts=restarts, total=self._limit.total)
        logger.error(
            "%s ended unexpectedly (%s), and its requests with it; it is started again (%d of %d restarts).",
            server.name, self._reason(server, exit_code, False), self._limit.total, self._limit.most,
        )  # fmt: skip
        return True

    def _reason(self, server: ApiServerProcess, exit_code: int, is_last: bool = True) -> str:
        """Why it ended, and, when it stays dead, after how many restarts."""
        said = exit_reason(exit_code) + (f": {server.failed.rstrip('.')}" if server.failed else "")
        if is_last and self._used_up and self._limit is not None:
            said += f"; --data-parallel-restart {self._limit.most} allows no further restart"
        return said

    async def _look_for_stalls(self) -> None:
        """Kill a server whose event loop has not answered for --engine-stall-seconds: then it is started again. One that is not ready yet has
        START_SECONDS. What counts is how often this process has asked, so that one that was halted itself blames nobody."""
        given = getattr(self._args, "engine_stall_seconds", None)
        seconds = STALL_SECONDS if given is None else given
        if not seconds or self._limit is None or not self._limit.most:
            return
        while not self._is_ending:
            for server in self._running if self._is_up else ():
                server.ask()
            await asyncio.sleep(seconds / QUESTIONS)
            for server in self._running:
                limit = seconds if server.is_ready else max(seconds, START_SECONDS)
                if server.unanswered * seconds >= QUESTIONS * limit:
                    flag = "--engine-stall-seconds" if server.is_ready else "it is not ready yet"
                    logger.error("%s has not answered for %g s (%s); it is killed.", server.name, limit, flag)
                    server.process.kill()
