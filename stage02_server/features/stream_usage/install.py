"""`--enable-force-include-usage`: every stream tells the usage, in each chunk and at its end, as vLLM's do."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.stream_usage.fields import ContinuousUsage
from stage02_server.protocol_types import AnswerHook
from stage02_server.serving_engine import EngineRequests


def install(app: FastAPI, services: Services) -> None:
    """Change all streams of the handlers."""
    services.added.hooks.append(_with_usage)


def _with_usage(requests: EngineRequests, prompts: list[Any]) -> AnswerHook:
    requests.ends_with_usage = True
    return ContinuousUsage(requests)
