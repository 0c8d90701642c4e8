"""The states of the server, and where they show: `/health`, the metrics, the trace.

    starting -> ready (-> stalled -> ready)* -> draining -> stopped        failed: the engine could not start, or died

HTTP is up in all states but `stopped`: a load balancer sees `starting` and `draining`, where a closed port
would show nothing. vLLM listens when its engine is ready, and answers /health with 200 or 503.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from stage02_server.errors import APIError, unavailable
from stage02_server.middleware import RequestGate
from stage03_engine.frontend.async_llm import AsyncLLM
from stagetrace import trace

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/load"})
"""Paths that answer in every state."""


class ServerState(enum.StrEnum):
    """What the server is doing."""

    STARTING = "starting"  # the engine loads
    READY = "ready"
    STALLED = "stalled"  # the engine has owed an answer for too long; a feature says so
    DRAINING = "draining"  # a signal came: running requests finish, new ones are refused
    STOPPED = "stopped"
    FAILED = "failed"  # the engine could not start, or died


_MESSAGES = {
    ServerState.STARTING: "The server is starting: the model is not loaded yet.",
    ServerState.DRAINING: "The server is shutting down.",
    ServerState.STOPPED: "The server is shutting down.",
    ServerState.FAILED: "The engine has died; this server is shutting down.",
}


class Lifecycle:
    """The state of the server, computed from the engine and the gate: there is nothing to keep in sync."""

    def __init__(self, engine: AsyncLLM, gate: RequestGate) -> None:
        self._engine, self._gate = engine, gate
        self._ended: ServerState | None = None
        self.health_headers: list[Callable[[], dict[str, str]]] = []  # what features tell at /health

    @property
    def state(self) -> ServerState:
        """The current state."""
        return self.own_state

    @property
    def own_state(self) -> ServerState:
        """The state as far as this process knows by itself, which is never `stalled`."""
        if self._ended is not None:
            return self._ended
        if self._engine.errored:
            return ServerState.FAILED
        if self._gate.draining:
            return ServerState.DRAINING
        return ServerState.STARTING if self._engine.ready is None else ServerState.READY

    def end(self, failed: bool) -> None:
        """The server has ended."""
        self._ended = ServerState.FAILED if failed else ServerState.STOPPED
        self.announce()

    def announce(self) -> None:
        """Trace the new state."""
        if trace.on:
            trace.emit("server.state", state=self.state.value)

    def refusal(self, path: str) -> APIError | None:
        """Why a request to `path` is refused in this state, or None. In `failed` each route answers for itself,
        since some do not need the engine; in `stalled` it may come back."""
        if path in OPEN_PATHS or self.own_state in (ServerState.READY, ServerState.FAILED):
            return None
        return self.unavailable()

    def unavailable(self) -> APIError:
        """The 503 of a state that is not `ready`."""
        return unavailable(_MESSAGES[self.state])
