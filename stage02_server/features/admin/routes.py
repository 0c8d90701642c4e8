"""Routes for operators: version, metrics, load, profiling (vllm/entrypoints/serve, basic router)."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from stage02_server.api_server import Services
from stage02_server.errors import APIError, not_found
from stage02_server.features.admin.metrics_text import MetricsText
from stage02_server.features.admin.server_load import ServerLoad
from stage03_engine import __version__

router = APIRouter()


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this project."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(raw_request: Request) -> Response:
    """The engine's numbers in Prometheus' text format, from the registry that the stat logger writes to; for frequent readers up to half
    a second old."""
    state = raw_request.app.state
    text = state.metrics_text.get(state.services.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/load")
async def get_server_load(raw_request: Request) -> dict[str, int]:
    """Requests that a model works on or that wait for it; 0 without --enable-server-load-tracking, as in vLLM."""
    state = raw_request.app.state
    tracks = state.services.args.enable_server_load_tracking
    return {"server_load": state.server_load.in_progress if tracks else 0}


async def _profile(raw_request: Request, start: bool) -> Response:
    engine = raw_request.app.state.services.engine
    if getattr(engine.vllm_config.observability_config, "profiler_dir", None) is None:  # or there is no profiler
        raise not_found("There is no folder for profiles: start the server with --profiler-dir.")
    if await engine.call("start_profile" if start else "stop_profile"):
        return Response()
    message = "The profiler is running already." if start else "There is no profile: none was started, or see the log."
    raise APIError(409, "ConflictError", message)


@router.post("/start_profile")
async def start_profile(raw_request: Request) -> Response:
    """Begin to record the engine with torch's profiler; 409 if it is being recorded."""
    return await _profile(raw_request, start=True)


@router.post("/stop_profile")
async def stop_profile(raw_request: Request) -> Response:
    """End the recording and write it to --profiler-dir, while all requests wait; 409 if there is none."""
    return await _profile(raw_request, start=False)


def install(app: FastAPI, services: Services) -> None:
    """Add the routes, and the count behind `/load`."""
    app.state.server_load, app.state.metrics_text = ServerLoad(), MetricsText()
    app.include_router(router)
