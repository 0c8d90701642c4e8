"""Start the API server: socket, engine, application, HTTP, in this order (vllm/entrypoints/launchers: app.py, launcher.py, api_server/entry.py).

The application asks for its parts by seam, and imports a feature only if it is on.
The web framework is imported inside functions: while this process imports it, the engine process loads the model.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stage02_server.cli_args import FrontendArgs
from stage03_engine.args.log import announce
from stage03_engine.config import VllmConfig
from stage03_engine.errors import ConfigError, StagesError
from stage03_engine.plugins import Part, features, keys, loaded, parts
from stagetrace import trace

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry

    from stage02_server.chat_template import ChatTemplate
    from stage02_server.lifecycle import Lifecycle
    from stage02_server.middleware import RequestGate
    from stage02_server.routes import OpenAIServingModels
    from stage02_server.serving_engine import Additions
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.core_client import AsyncEngineCoreClient

logger = logging.getLogger(__name__)
T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


REFUSED = "refused"  # the name of routes that exist only to say why they are not served
LAYERS = ("connection", "address", "", "count", "own", "browser", "key", "body", "queue", "stream")
"""Places of middleware, outermost first; the walk's own is at the empty one. Each layer is made with (app, args)."""


@dataclass
class Services:
    """What the routes work with, in `app.state.services`."""

    engine: AsyncLLM
    args: FrontendArgs
    registry: CollectorRegistry  # of the metrics
    models: OpenAIServingModels
    template: ChatTemplate
    gate: RequestGate
    lifecycle: Lifecycle
    added: Additions  # by features


class StopRequested(Exception):
    """A signal came before the server was up."""


class StopSignals:
    """`first` is set by the first signal, whose name is `name`; `second` by the next one."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""

    def received(self, name: str) -> None:
        """A signal, or something else, asks the server to end."""
        if self.first.is_set():
            self.second.set()
        self.name = self.name or name
        self.first.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for signals inside the `with` block. If one came, later ones are ignored: the process is about to end, and
        another signal must not stop it half-way, with a different exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.received, number.name)
        try:
            yield
        finally:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # no signal may arrive in between
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                if self.first.is_set():
                    signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises StopRequested, and cancels it, when a signal comes first."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self.first.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StopRequested
            return working.result()
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)


def serve(vllm_config: VllmConfig, args: FrontendArgs) -> int:
    """Run the server until a signal ends it; returns the exit code. Raises StagesError if it cannot start."""
    prepare_process(args)
    try:
        return run_loop(run_server(vllm_config, args))
    except KeyboardInterrupt:  # Ctrl-C in the moment before the event loop listens to signals
        return 0


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in an event loop, that of uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def prepare_process(args: FrontendArgs) -> None:
    """What features do in the server's process before anything else."""
    for part in used("process", args):
        part.load()(args)


def connection_settings(args: FrontendArgs) -> dict[str, Any]:
    """What features add to the arguments of uvicorn.Config."""
    return {name: value for part in used("connection", args) for name, value in part.load()(args).items()}


async def run_server(vllm_config: VllmConfig, args: FrontendArgs) -> int:
    """Bind the port, then run one API server on it. Raises StagesError if the port is taken or the engine cannot start."""
    stop = StopSignals()
    with stop.installed():
        address, sock = setup_server(args, "https" if getattr(args, "ssl_certfile", None) else "http")
        announce(vllm_config, args)
        with sock:
            try:
                exit_code = await run_server_worker(address, sock, vllm_config, args, stop)
            except StopRequested:
                logger.info("%s during start-up.", stop.name)
                exit_code = 0
    if trace.on:
        trace.emit("server.stopped", exit_code=exit_code)
        trace.flush()
    logger.info("Stopped.")
    return exit_code


def setup_server(args: FrontendArgs, scheme: str = "http") -> tuple[str, socket.socket]:
    """The address to show people and the bound socket, before the engine spends seconds on loading."""
    if own := used("socket", args):
        address, sock = own[0].load()(args)
    else:
        sock = create_server_socket(args.host or "", args.port)
        host, port = args.host or "0.0.0.0", sock.getsockname()[1]
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    if trace.on:
        trace.emit("server.socket_bound", address=address)
    return address, sock


def create_server_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises StagesError if the port is taken or the address is not local."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # A port whose last connections have just closed needs SO_REUSEADDR. But two sockets with that flag may share a
    # port until one of them listens, and the loser would find out after loading a model: so first try without.
    for reuse in (0, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind((host, port))
            return sock
        except (OSError, OverflowError) as error:
            sock.close()
            failed = error
    raise _socket_error(host, port, failed)


def _socket_error(host: str, port: int, error: Exception) -> StagesError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return StagesError(f"port {port} is taken; choose another one with --port, or --port 0 for any that is free")
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return StagesError(f"this machine has no address {host!r}; see --host")
    reason = getattr(error, "strerror", None) or error
    return StagesError(f"cannot listen on port {port}: {reason}; choose another one with --port")


async def run_server_worker(
    address: str, sock: socket.socket, vllm_config: VllmConfig, args: FrontendArgs, stop: StopSignals
) -> int:
    """Everything between the bound port and the exit code."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    async with build_async_engine_client(vllm_config, args, registry) as engine:
        app = build_app(args)  # while the engine process loads
        init_app_state(engine, app, args, registry)
        from stage02_server.launcher import serve_http

        try:
            return await serve_http(app, sock, address, stop, connection_settings(args))
        except OSError as error:
            raise _socket_error(args.host or "", args.port, error) from error


@asynccontextmanager
async def build_async_engine_client(
    vllm_config: VllmConfig, args: FrontendArgs, registry: CollectorRegistry
) -> AsyncIterator[AsyncLLM]:
    """The engine's front end; its engine process starts to load. Both end with the `with` block."""
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.metrics import make_stat_loggers

    model = vllm_config.model_config
    if trace.on:
        trace.emit(
            "server.engine_config", model=model.model, dtype=model.dtype, max_model_len=vllm_config.max_model_len,
            device=vllm_config.device_config.device,
        )  # fmt: skip
    model_name = served_model_names(vllm_config, args)[0]
    own = (kind(vllm_config, registry, model_name) for kind in loaded("stats", "server"))
    stat_loggers = [*make_stat_loggers(vllm_config), *own]
    client = make_core_client(vllm_config, args)
    engine = AsyncLLM.from_vllm_config(vllm_config, client=client, stat_loggers=stat_loggers)
    try:
        yield engine
    finally:
        engine.shutdown()


def own_client(args: FrontendArgs) -> Part | None:
    """What makes the client that a flag asks for; None for the default one, with an engine process."""
    for asked, part in keys("client").items():
        flag, _, value = asked.partition("=")
        if str(getattr(args, flag)) == value:
            return part
    return None


def make_core_client(vllm_config: VllmConfig, args: FrontendArgs) -> AsyncEngineCoreClient | None:
    """The client that a flag asks for; None for the default one."""
    part = own_client(args)
    return None if part is None else part.load()(vllm_config)


def used(seam: str, args: FrontendArgs, tasks: tuple[str, ...] = (), key: str = "") -> list[Part]:
    """The parts at this seam that are on, for these settings and a model with these tasks."""
    return [part for part in parts(seam, key) if part.is_on(args, tasks)]


def served_model_names(vllm_config: VllmConfig, args: FrontendArgs) -> tuple[str, ...]:
    """The names that requests may use; answers use the first one."""
    return args.served_model_name or (vllm_config.model_config.model,)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Freeze what exists by now: each garbage collection pauses all streams, and so has less to scan."""
    gc.collect()
    gc.freeze()
    yield


def build_app(args: FrontendArgs) -> FastAPI:
    """The application with its middleware and the routes of the walk, without any state. Raises ConfigError."""
    from fastapi import FastAPI
    from starlette.middleware import Middleware

    from stage02_server.errors import add_exception_handlers
    from stage02_server.middleware import PREFIX, RequestGate, RequestMiddleware
    from stage02_server.routes import router

    asked = {part.key for each in features("stage02_server") for part in each.parts if part.seam == "middleware"}
    if lost := asked - set(LAYERS):
        raise ConfigError(
            f"there is no place {lost.pop()!r} for middleware; there are {', '.join(filter(None, LAYERS))}"
        )
    layers: list[Middleware] = []
    for place in LAYERS:
        kinds = [part.load() for part in used("middleware", args, key=place)] if place else [RequestMiddleware]
        layers += [Middleware(kind, args) for kind in kinds]
    app = FastAPI(title="vLLM in stages", lifespan=lifespan, openapi_url=None, middleware=layers)
    app.state.gate, app.state.prefixes, app.state.unchosen_ids = RequestGate(), dict(PREFIX), set()
    add_exception_handlers(app)
    app.middleware_stack = app.build_middleware_stack()  # now, because a user's layer may fail
    app.include_router(router)
    if trace.on:
        trace.emit("server.app_built", middleware=len(layers))
    return app


def init_app_state(engine: AsyncLLM, app: FastAPI, args: FrontendArgs, registry: CollectorRegistry) -> None:
    """Make the services and the handlers, and install the features that are on. Raises ConfigError."""
    from stage02_server.chat_template import ChatTemplate
    from stage02_server.lifecycle import Lifecycle
    from stage02_server.routes import LateRoutes, OpenAIServingModels
    from stage02_server.serving_chat import OpenAIServingChat
    from stage02_server.serving_completion import OpenAIServingCompletion
    from stage02_server.serving_engine import Additions

    config, names = engine.vllm_config, served_model_names(engine.vllm_config, args)
    variants = {name: sets for more in loaded("names") for name, sets in more(config).items()}
    models, template = OpenAIServingModels(config, names, variants), ChatTemplate(args, engine.tokenizer)
    gate = app.state.gate
    services = Services(engine, args, registry, models, template, gate, Lifecycle(engine, gate), Additions())
    app.state.services = services
    app.state.openai_serving_completion = OpenAIServingCompletion(services)
    app.state.openai_serving_chat = OpenAIServingChat(services)
    tasks = config.supported_tasks
    routes = [
        *(used("routes", args, tasks, key="client") if config.hooks("client") else ()),
        *used("routes", args, tasks),
    ]
    for part in routes:
        app.state.prefixes |= {path: prefix for path, prefix in part.paths.items() if prefix}
        app.state.unchosen_ids |= part.paths.keys() if part.own_ids else set()
        if part.late:
            LateRoutes(app, services, part)
        else:
            part.load()(app, services)
    for part in used("answers", args, tasks):
        part.load()(app, services)
    if config.model_config.default_sampling_params:
        logger.info("Sampling defaults of this model: %s.", config.model_config.default_sampling_params)
    if trace.on:
        trace.emit("server.state_ready", served_model_names=list(names), paths=len(served_paths(app.routes)))


def served_paths(routes: Iterable[Any]) -> set[str]:
    """The paths of these routes and of the routers among them, without those that are refused with a reason."""
    paths: set[str] = set()
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:  # newer versions of FastAPI nest them
            paths |= served_paths(router.routes)
        elif getattr(route, "name", "") != REFUSED:
            paths.add(route.path)
    return paths
