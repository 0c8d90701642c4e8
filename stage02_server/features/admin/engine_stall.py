"""The state `stalled`: the engine process is there, but has said nothing for too long (`--engine-stall-seconds`).

A sign of life is what a step sends. The engine's threads for sockets would answer while the busy loop hangs in a driver, so their
heartbeat would prove nothing; and the loop sends something at each step and after each abort, so nobody needs to ask. While there is no
request, silence means nothing. But an answer that is owed stays owed when its clients give up: the engine must first react
to that.

The state is computed when somebody asks for it: /health or /metrics. Requests are still accepted, and wait for the engine, which
may come back. vLLM's /health only knows whether the engine process has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from stage02_server.errors import APIError, unavailable
from stage02_server.lifecycle import Lifecycle, ServerState
from stage02_server.middleware import RequestGate
from stage03_engine.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


class EngineStall:
    """Knows how long an engine has owed an answer."""

    def __init__(self, engine: AsyncLLM, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._limit, self._clock = engine, limit, clock
        self._last_sign = self._started = clock()
        self._owes_since: float | None = None

    @property
    def seconds(self) -> float:
        """For how long the engine has owed an answer; 0 if it owes none."""
        sign = max(self._engine.last_outputs_at, self._started)
        if sign != self._last_sign:  # the engine lives: it begins to owe again with its oldest request, from then on
            self._last_sign, self._owes_since = sign, None
        if self._owes_since is None and (states := self._engine.output_processor.request_states):
            oldest = next(iter(states.values())).request.arrival_time
            self._owes_since = max(oldest, self._last_sign)
        return 0.0 if self._owes_since is None else self._clock() - self._owes_since

    @property
    def is_too_long(self) -> bool:
        """Is the engine at a standstill?"""
        return self.seconds > self._limit


class StallLifecycle(Lifecycle):
    """The states, with `stalled` in place of `ready` while the engine stands still."""

    def __init__(self, engine: AsyncLLM, gate: RequestGate, stall: EngineStall) -> None:
        super().__init__(engine, gate)
        self._stall, self._was_stalled = stall, False

    @property
    def state(self) -> ServerState:
        """The current state. Logged and traced when it becomes `stalled`, and when that is over."""
        state = super().state
        stalled = state == ServerState.READY and self._stall.is_too_long
        if stalled != self._was_stalled:
            self._was_stalled = stalled
            self.announce()
            if stalled:
                logger.error("%s /health answers 503 until it does.", self._said())
            else:
                logger.warning("The engine no longer stands still; the server is %s.", state.value)
        return ServerState.STALLED if stalled else state

    def _said(self) -> str:
        return f"The engine has not answered for {self._stall.seconds:.1f} s (--engine-stall-seconds)."

    def unavailable(self) -> APIError:
        """The 503 of a state that is not `ready`."""
        return unavailable(self._said()) if self.state == ServerState.STALLED else super().unavailable()
