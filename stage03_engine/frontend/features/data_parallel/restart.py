"""How often dead engines are started again (`--data-parallel-restart`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from stage03_engine.errors import EngineDeadError

WINDOW_SECONDS = 600.0


class NodeLostError(EngineDeadError):
    """The engine's machine is gone, and all engines on it."""


class RestartLimit:
    """At most `most` restarts within ten minutes, of all engines together."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.total = 0  # since the start
        self._clock = clock
        self._recent: deque[float] = deque()

    def take(self) -> bool:
        """May an engine be started again now? A yes counts as a restart."""
        now = self._clock()
        while self._recent and now - self._recent[0] >= WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) >= self.most:
            return False
        self._recent.append(now)
        self.total += 1
        return True
