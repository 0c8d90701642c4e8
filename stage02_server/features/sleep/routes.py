"""Routes that let the engine sleep. They take it away from everybody, so they exist only with --server-dev-mode (vllm/entrypoints/serve/dev/sleep)."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response

from stage02_server.api_server import Services
from stage02_server.errors import APIError
from stage03_engine.errors import InvalidRequestError

dev_router = APIRouter()
Tag = Literal["weights", "kv_cache"]


@dev_router.post("/sleep")
async def sleep(
    raw_request: Request,
    level: Annotated[int, Query(ge=1, le=2, description="1 keeps the weights, 2 loads them again on waking.")] = 1,
) -> Response:
    """Give the engine's memory back; 409 while requests run or wait. Until it wakes, requests are refused (429)."""
    try:
        await raw_request.app.state.services.engine.sleep(level)
    except InvalidRequestError as error:
        raise APIError(409, "ConflictError", str(error), error.param) from error
    return Response()


@dev_router.post("/wake_up")
async def wake_up(
    raw_request: Request,
    tags: Annotated[
        list[Tag] | None, Query(max_length=2, description="weights, kv_cache, or both; both if not given.")
    ] = None,
) -> Response:
    """Take the memory again; 409 if the engine does not sleep."""
    try:
        await raw_request.app.state.services.engine.wake_up(tags)
    except InvalidRequestError as error:
        raise APIError(409, "ConflictError", str(error), error.param) from error
    return Response()


@dev_router.get("/is_sleeping")
async def is_sleeping(raw_request: Request) -> dict[str, bool]:
    """Does the engine, or one of several, sleep?"""
    return {"is_sleeping": await raw_request.app.state.services.engine.is_sleeping()}


def install(app: FastAPI, services: Services) -> None:
    """Add the routes."""
    app.include_router(dev_router)
