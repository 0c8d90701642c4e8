"""Start the API server: socket, engine, application, HTTP, in this order (vllm/entrypoints/openai/api_server.py).

The web framework is imported inside functions: while this process imports it, the engine process loads the model.
"""

from __future__ import annotations

import errno
import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.flags import load_log_config
from stage02_server.logger import configure_logging, hide_access_log_of
from stage02_server.open_files import set_ulimit
from stage02_server.stop_signals import StopRequested, StopSignals
from stage02_server.unix_socket import create_server_unix_socket, remove_unix_socket
from stage03_engine.config import VllmConfig
from stage03_engine.errors import StagesError
from stagetrace import trace

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry
    from starlette.datastructures import State

    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.core_client import AsyncEngineCoreClient

logger = logging.getLogger(__name__)


def serve(vllm_config: VllmConfig, args: FrontendArgs) -> int:
    """Run the server until it is told to stop; returns the exit code. Raises StagesError when it cannot start."""
    import uvloop

    if args.log_config_file is not None:
        load_log_config(args.log_config_file)
    configure_logging()
    set_ulimit()
    if args.disable_access_log_for_endpoints is not None:
        hide_access_log_of(args.disable_access_log_for_endpoints.split(","))
    try:
        return uvloop.run(run_server(vllm_config, args))
    except KeyboardInterrupt:  # Ctrl-C in the moment before the event loop listens to signals
        return 0


async def run_server(vllm_config: VllmConfig, args: FrontendArgs) -> int:
    """Bind the port, then run one API server on it. Raises StagesError when the port or the engine is not to be had."""
    stop = StopSignals()
    with stop.installed():
        address, sock = setup_server(args)
        with sock:
            try:
                exit_code = await run_server_worker(address, sock, vllm_config, args, stop)
            except StopRequested:
                logger.info("%s during start-up.", stop.name)
                exit_code = 0
            finally:
                remove_unix_socket(args.uds)
    if trace.on:
        trace.emit("server.stopped", exit_code=exit_code)
        trace.flush()
    logger.info("Stopped.")
    return exit_code


def setup_server(args: FrontendArgs) -> tuple[str, socket.socket]:
    """The address for people and the bound socket, before the engine spends seconds on loading."""
    if args.uds is not None:
        sock, address = create_server_unix_socket(args.uds), f"unix:{args.uds}"
    else:
        sock = create_server_socket(args.host or "", args.port)
        host, port = args.host or "0.0.0.0", sock.getsockname()[1]
        scheme = "http" if args.ssl_certfile is None else "https"
        address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    if trace.on:
        trace.emit("server.socket_bound", address=address)
    return address, sock


def create_server_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises StagesError when the address is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # A port on which our last connections have just ended needs SO_REUSEADDR. But two sockets with that flag may share a
    # port until one of them listens, and the loser would learn it after loading a model: so the first try goes without.
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
        app = build_app(args)  # the engine process loads meanwhile
        init_app_state(engine, app.state, args, registry)
        from stage02_server.launcher import serve_http

        try:
            return await serve_http(app, sock, address, engine, args, stop)
        except OSError as error:
            raise _socket_error(args.host or "", args.port, error) from error


@asynccontextmanager
async def build_async_engine_client(
    vllm_config: VllmConfig, args: FrontendArgs, registry: CollectorRegistry
) -> AsyncIterator[AsyncLLM]:
    """The engine's front end, whose engine process starts to load; it is ended and reaped on leaving."""
    from stage02_server.echo_engine import EchoCoreClient
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.metrics import LoggingStatLogger, PrometheusStatLogger, StatLogger

    model = vllm_config.model_config
    if trace.on:
        trace.emit(
            "server.engine_config", model=model.model, dtype=model.dtype, max_model_len=vllm_config.max_model_len,
            device=vllm_config.device_config.device,
        )  # fmt: skip
    stat_loggers: list[StatLogger] = [
        PrometheusStatLogger(vllm_config, registry, served_model_names(vllm_config, args)[0])
    ]
    if not vllm_config.observability_config.disable_log_stats:
        stat_loggers.append(LoggingStatLogger(vllm_config))
    client: AsyncEngineCoreClient | None = None  # None: an engine process
    if args.engine == "echo":
        client = EchoCoreClient(vllm_config)
    elif args.in_process:
        from stage03_engine.core.make_core import make_core  # the only way for torch into this process
        from stage03_engine.frontend.features.async_inproc_client import AsyncInprocClient

        client = AsyncInprocClient(vllm_config, make_core)
    engine = AsyncLLM.from_vllm_config(vllm_config, client=client, stat_loggers=stat_loggers)
    try:
        yield engine
    finally:
        engine.shutdown()


def served_model_names(vllm_config: VllmConfig, args: FrontendArgs) -> tuple[str, ...]:
    """The names that requests may use; the first one is what answers say."""
    return args.served_model_name or (vllm_config.model_config.model,)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """What exists by now stays: the garbage collector need not look at it again while it pauses the stream of tokens."""
    gc.collect()
    gc.freeze()
    yield


def build_app(args: FrontendArgs) -> FastAPI:
    """The application with all its routes, without any state."""
    from fastapi import FastAPI

    from stage02_server import metrics, routes as api_router
    from stage02_server.errors import add_exception_handlers
    from stage02_server.features import admin as utility_router
    from stage02_server.features.audio import routes as audio_router
    from stage02_server.features.hardening.middleware import RequestIdHeaderMiddleware, add_inner_middleware
    from stage02_server.features.page import docs as docs_router, routes as page_router
    from stage02_server.features.page.openapi import describe_answers
    from stage02_server.features.pooling import routes as pooling_router
    from stage02_server.features.refusals import router as absent_routes
    from stage02_server.features.responses.routes import router as responses_router
    from stage02_server.middleware import RequestGate, RequestMiddleware

    app = FastAPI(
        title="vLLM in stages",
        lifespan=lifespan,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",  # /redoc goes with it
        docs_url=None,  # its scripts come from elsewhere; docs_router has one that needs no network
    )
    app.root_path = (args.root_path or "").rstrip("/")
    app.include_router(api_router.router)
    app.include_router(metrics.router)
    app.include_router(pooling_router.router)
    app.include_router(audio_router.router)
    app.include_router(utility_router.router)
    app.include_router(page_router.router)
    if not args.disable_fastapi_docs:
        app.include_router(docs_router.router)
    app.state.gate = RequestGate()
    add_inner_middleware(app, args)
    app.add_middleware(RequestMiddleware, gate=app.state.gate)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdHeaderMiddleware)
    add_exception_handlers(app)
    for router in (responses_router, absent_routes):
        app.include_router(router)
    describe_answers(app)
    if trace.on:
        trace.emit("server.app_built", routes=len(app.routes))
    return app


def init_app_state(engine: AsyncLLM, state: State, args: FrontendArgs, registry: CollectorRegistry) -> None:
    """Put the handlers where the routes find them. Raises ConfigError for an impossible chat template."""
    from stage02_server.chat_template import ChatTemplate
    from stage02_server.features.audio.serving import ServingTranscription
    from stage02_server.features.pooling.score import ServingScores
    from stage02_server.features.pooling.serving import ServingClassification, ServingPooling
    from stage02_server.features.responses.serving import OpenAIServingResponses
    from stage02_server.features.tokenize import OpenAIServingTokenization
    from stage02_server.lifecycle import Lifecycle
    from stage02_server.request_logger import RequestLogger
    from stage02_server.server_load import ServerLoad
    from stage02_server.serving_chat import OpenAIServingChat
    from stage02_server.serving_completion import OpenAIServingCompletion
    from stage02_server.serving_models import OpenAIServingModels

    config, names = engine.vllm_config, served_model_names(engine.vllm_config, args)
    models = OpenAIServingModels(config, names)
    template = ChatTemplate(args, engine.tokenizer)
    state.engine_client = engine
    state.registry = registry
    state.args = args
    state.lifecycle = Lifecycle(engine, state.gate)
    state.lifecycle.register(registry)
    state.server_load = ServerLoad(engine, args.max_queue_len)
    state.openai_serving_models = models
    state.openai_serving_completion = OpenAIServingCompletion(engine, models, args)
    state.openai_serving_chat = OpenAIServingChat(engine, models, template, args)
    state.openai_serving_tokenization = OpenAIServingTokenization(
        engine.tokenizer, models, template, config.max_model_len
    )
    state.serving_pooling = ServingPooling(engine, models, template)
    state.serving_classification = ServingClassification(engine, models, template)
    state.serving_scores = ServingScores(engine, models, template, joins=args.chat_template is not None)
    state.serving_transcription = ServingTranscription(engine, models, args)
    answers = state.openai_serving_chat.answers
    state.openai_serving_responses = OpenAIServingResponses(engine, models, template, args, answers)
    if args.enable_log_requests:
        handlers = (
            state.openai_serving_completion, state.openai_serving_chat, state.openai_serving_responses,
            state.serving_pooling, state.serving_classification, state.serving_scores, state.serving_transcription,
        )  # fmt: skip
        for handler in handlers:
            handler.request_logger = RequestLogger(args.max_log_len)
    if config.model_config.default_sampling_params:
        logger.info("Sampling defaults of this model: %s.", config.model_config.default_sampling_params)
    if trace.on:
        trace.emit("server.state_ready", served_model_names=list(names))
