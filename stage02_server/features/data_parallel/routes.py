"""What a server with several engines has besides: the state `degraded` in /health, two metrics, POST /scale_engines.

vLLM's /health has one state for all engines, and its POST /scale_elastic_ep needs Ray and expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from stage02_server.api_server import Services
from stage02_server.errors import APIError, error_object, unavailable
from stage02_server.features.data_parallel.lost_answers import LostAnswers
from stage02_server.lifecycle import ServerState
from stage02_server.routes import health
from stage03_engine.errors import StagesError
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient, ScalingError
from stage03_engine.frontend.features.data_parallel.manifest import MAX_ENGINES

STATE_HEADER = "X-Server-State"
DEGRADED = "degraded"
STALL_SECONDS = 60.0  # less than for a single engine: others can take over, and what is lost by a mistake is a restart
GRACE_SECONDS = 0.1  # see DPLBAsyncMPClient.grace_seconds
router, dev_router = APIRouter(), APIRouter()


class ScaleRequest(BaseModel):
    """The body of POST /scale_engines."""

    data_parallel_size: Annotated[int, Field(strict=True, ge=1, le=MAX_ENGINES)] = Field(
        description="How many engines there should be."
    )


def client_of(raw_request: Request) -> DPLBAsyncMPClient:
    """The client of the engines."""
    return raw_request.app.state.services.engine.engine_core


@router.get("/health", include_in_schema=False)
async def health_of_engines(raw_request: Request) -> Response:
    """The same as with one engine while all are ready. 200 with the state `degraded` while some are, and 503 while none is."""
    client = client_of(raw_request)
    lifecycle = raw_request.app.state.services.lifecycle
    if lifecycle.state != ServerState.READY or client.num_ready >= client.size:
        return await health(raw_request)
    content: dict[str, Any] = {"state": DEGRADED, "engines": client.states}
    if not client.num_ready:
        content |= error_object(unavailable("No engine is ready; they are being started again."))
    return JSONResponse(content, 200 if client.num_ready else 503, headers={STATE_HEADER: DEGRADED})


@dev_router.post("/scale_engines")
async def scale_engines(body: ScaleRequest, raw_request: Request) -> dict[str, int]:
    """Change the number of engines: start more, or let the last ones finish their requests and end. Answers when that is done.
    409 while the number is already being changed, or while an engine is being started again."""
    client = client_of(raw_request)
    try:
        await client.scale(body.data_parallel_size)
    except ScalingError as error:
        raise APIError(409, "ConflictError", str(error)) from error
    except (StagesError, OSError) as error:
        raise unavailable(f"A new engine cannot start; there are as many as before: {error}") from error
    return {"data_parallel_size": client.size}


class EngineCollector(Collector):
    """Which engines are ready, and how many restarts there were, at the moment when somebody reads /metrics."""

    def __init__(self, client: DPLBAsyncMPClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """The two metrics."""
        ready = GaugeMetricFamily(
            "stages:engine_ready", "1 for an engine that takes requests, else 0.", labels=["engine"]
        )
        for index, state in self._client.states.items():
            ready.add_metric([str(index)], float(state == "ready"))
        yield ready
        restarts = CounterMetricFamily("stages:engine_restarts", "How often a dead engine has been started again.")
        restarts.add_metric([], self._client.num_restarts)
        yield restarts


def install(app: FastAPI, services: Services) -> None:
    """Add the metrics and the routes; /health comes before the walk's own, which this one asks."""
    client = services.engine.engine_core
    if not isinstance(client, DPLBAsyncMPClient):
        return  # one engine, with a load balancer in front of several servers
    stall = services.args.engine_stall_seconds
    client.stall_seconds, client.grace_seconds = STALL_SECONDS if stall is None else stall, GRACE_SECONDS
    services.engine.listeners.append(LostAnswers(services.engine.output_processor))
    services.registry.register(EngineCollector(client))
    before = len(app.router.routes)
    app.include_router(router)
    app.router.routes[:0] = [app.router.routes.pop() for _ in range(len(app.router.routes) - before)]
    if services.args.server_dev_mode and (getattr(services.args, "api_server_count", None) or 1) == 1:
        app.include_router(dev_router)
