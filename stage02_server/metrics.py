"""GET /metrics: the engine's numbers in Prometheus' text format (vllm/entrypoints/openai/api_server.py, mount_metrics)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

router = APIRouter()


@router.get("/metrics")
async def metrics(raw_request: Request) -> Response:
    """The registry that the stat logger writes to."""
    return Response(generate_latest(raw_request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
