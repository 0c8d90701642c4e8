"""Routes that show or change other people's requests, and so exist only with --server-dev-mode: settings, aborting, the prefix cache
(vllm/entrypoints/serve, dev router).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response
from pydantic import BaseModel, Field

from stage02_server.api_server import Services
from stage02_server.errors import APIError
from stage02_server.features.admin.end_requests import end_requests, running_request_ids
from stage02_server.protocol_types import Text

dev_router, own_router = APIRouter(), APIRouter()
MAX_ABORTS = 1000
_RANDOM_PART = re.compile(r"-[0-9a-f]{8}\Z")


class AbortRequest(BaseModel):
    """Answer ids, as the clients got them."""

    request_ids: Annotated[list[Text], Field(max_length=MAX_ABORTS)] = Field(
        description="Ids of answers whose requests shall end."
    )


@dev_router.get("/server_info")
async def show_server_info(
    raw_request: Request, config_format: Annotated[Literal["text", "json"], Query(description="text or json.")] = "text"
) -> dict[str, Any]:
    """All settings of the engine, as Python writes them or as JSON."""
    config = raw_request.app.state.services.engine.vllm_config
    config = replace(config, cache_config=replace(config.cache_config, prefix_caching_hash_seed=None))  # a secret
    return {"vllm_config": msgspec.to_builtins(config) if config_format == "json" else str(config)}


@own_router.post("/abort_requests")
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


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw_request: Request) -> Response:
    """Forget all cached prefixes; 409 while requests run, because their blocks are in use."""
    if await raw_request.app.state.services.engine.call("reset_prefix_cache"):
        return Response(status_code=200)
    raise APIError(
        409, "ConflictError", "The prefix cache is in use by running requests; try again when they are done."
    )


def install(app: FastAPI, services: Services) -> None:
    """Add the routes. One of several API servers would find only its own requests: none is aborted there."""
    app.include_router(dev_router)
    if (getattr(services.args, "api_server_count", None) or 1) == 1:
        app.include_router(own_router)
