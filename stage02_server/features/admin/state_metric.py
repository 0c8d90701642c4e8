"""The metric `stages:server_state`: 1 for the state that the server is in, 0 for the others."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from prometheus_client import Gauge

from stage02_server.api_server import Services
from stage02_server.lifecycle import Lifecycle, ServerState


def install(app: FastAPI, services: Services) -> None:
    """Add the metric to the registry of /metrics."""
    gauge = Gauge("stages:server_state", "1 for the state of the server.", ["state"], registry=services.registry)
    for state in ServerState:
        gauge.labels(state=state.value).set_function(partial(_is, services.lifecycle, state))


def _is(lifecycle: Lifecycle, state: ServerState) -> float:
    return float(lifecycle.state == state)
