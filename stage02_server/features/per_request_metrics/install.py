"""`--enable-per-request-metrics` (vllm/entrypoints/openai/completion/protocol.py)."""

from __future__ import annotations

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.per_request_metrics.hook import MetricsHook


def install(app: FastAPI, services: Services) -> None:
    """Measure all requests that the handlers get."""
    services.added.hooks.append(lambda requests, prompts: MetricsHook())
