"""Routes for operators: version, metrics, load, settings, aborting, profiling (vllm/entrypoints/serve, basic and dev routers).

What shows or changes other people's requests is in `dev_router`, whose routes exist only with --server-dev-mode.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from stage02_server.api_server import Services
from stage02_server.errors import APIError, not_found
from stage02_server.features.admin.end_requests import end_requests, running_request_ids
from stage02_server.features.admin.metrics_text import MetricsText
from stage02_server.features.admin.server_load import ServerLoad
from stage02_server.protocol_types import Text

router, dev_router = APIRouter(), APIRouter()
MAX_ABORTS = 1000
_RANDOM_PART = re.compile(r"-[0-9a-f]{8}\Z")


class AbortRequest(BaseModel):
    """Answer ids, as the clients got them."""

    request_ids: Annotated[list[Text], Field(max_length=MAX_ABORTS)] = Field(
        description="Ids of answers whose requests shall end."
    )


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this project."""
    return {"version": _version()}


@cache
def _version() -> str:
    return version("vllm-in-stages")  # reads a file


@router.get("/metrics")
async def metrics(raw_request: Request) -> Response:
    """The engine's numbers in Prometheus' text format, from the registry that the stat logger writes to; those of at most half a second
    ago for who asks again and again."""
    state = raw_request.app.state
    text = state.metrics_text.get(state.services.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/load")
async def get_server_load(raw_request: Request) -> dict[str, int]:
    """Requests that a model works on or that wait for it; 0 without --enable-server-load-tracking, as in vLLM."""
    state = raw_request.app.state
    tracks = state.services.args.enable_server_load_tracking
    return {"server_load": state.server_load.in_progress if tracks else 0}


@dev_router.get("/server_info")
async def show_server_info(
    raw_request: Request, config_format: Annotated[Literal["text", "json"], Query(description="text or json.")] = "text"
) -> dict[str, Any]:
    """All settings of the engine, as Python writes them or as JSON."""
    config = raw_request.app.state.services.engine.vllm_config
    config = replace(config, cache_config=replace(config.cache_config, prefix_caching_hash_seed=None))  # a secret
    return {"vllm_config": msgspec.to_builtins(config) if config_format == "json" else str(config)}


@dev_router.post("/abort_requests")
async def abort_requests(body: AbortRequest, raw_request: Request) -> Response:
    """End requests by the ids of their answers; each gets what there is, with the finish reason "abort". Ids that do not
    run are ignored: they may just have ended. So are those of another API key."""
    engine, tenants = raw_request.app.state.services.engine, getattr(raw_request.app.state, "tenants", None)
    named = set(body.request_ids)
    ids = [request_id for request_id in running_request_ids(engine) if not named.isdisjoint(_response_ids(request_id))]
    if tenants is not None:  # there are several API keys
        ids = [request_id for request_id in ids if tenants.owns(request_id)]
    await end_requests(engine, ids, "POST /abort_requests")
    return Response()


def _response_ids(request_id: str) -> tuple[str, ...]:
    """The ids that the answer of an engine request may have: its own ends in the number of the prompt, after a random part if the
    client chose the id."""
    name, _, number = request_id.rpartition("-")
    return (name, _RANDOM_PART.sub("", name)) if number.isdecimal() else ()


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


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw_request: Request) -> Response:
    """Forget all cached prefixes; 409 while requests run, because their blocks are in use."""
    if await raw_request.app.state.services.engine.call("reset_prefix_cache"):
        return Response(status_code=200)
    raise APIError(
        409, "ConflictError", "The prefix cache is in use by running requests; try again when they are done."
    )


def install(app: FastAPI, services: Services) -> None:
    """Add the routes, and the count behind `/load`."""
    app.state.server_load, app.state.metrics_text = ServerLoad(), MetricsText()
    app.include_router(router)
    if services.args.server_dev_mode:
        app.include_router(dev_router)
