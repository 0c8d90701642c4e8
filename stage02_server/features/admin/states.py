"""What the states of the server need besides `lifecycle.py`: a watch on the engine, and the metric `stages:server_state`."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from prometheus_client import Gauge

from stage02_server.api_server import Services
from stage02_server.features.admin.engine_stall import EngineStall, StallLifecycle
from stage02_server.lifecycle import Lifecycle, ServerState

STALL_SECONDS = 300.0
"""After which a server of one engine is `stalled`, and one whose engines are all silent, if no flag says otherwise."""


def install(app: FastAPI, services: Services) -> None:
    """Watch the engine, if --engine-stall-seconds says so, and add the metric to the registry of /metrics."""
    given = services.args.engine_stall_seconds
    if limit := STALL_SECONDS if given is None else given:
        services.lifecycle = StallLifecycle(services.engine, services.gate, EngineStall(services.engine, limit))
    gauge = Gauge("stages:server_state", "1 for the state of the server.", ["state"], registry=services.registry)
    for state in ServerState:
        gauge.labels(state=state.value).set_function(partial(_is, services.lifecycle, state))


def _is(lifecycle: Lifecycle, state: ServerState) -> float:
    return float(lifecycle.state == state)
