"""Everybody who watches the scheduler, over one stream of its events (vLLM has no counterpart).

The engine tells its events while there is at least one watcher and is silent otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

MAX_WATCHERS = 16
MAX_STEPS_BEHIND = 1024  # a watcher who reads more slowly than that is let go, and may come again


WatchQueue = asyncio.Queue[list[bytes] | None]
"""Each item is one step's events, as lines of JSON; None is the end."""


class WatchError(Exception):
    """Nobody, or nobody else, can watch this engine now."""


class Watchable(Protocol):
    """What it needs of a client of the engine core."""

    def watch_scheduler_async(self) -> Awaitable[bool]: ...
    def unwatch_scheduler_async(self) -> Awaitable[None]: ...


class EngineWatch:
    """Hands each step's events to every watcher, each with a bounded queue of its own."""

    def __init__(self, client: Watchable) -> None:
        self._client = client
        self._queues: set[WatchQueue] = set()
        self._closed = False

    async def start(self) -> WatchQueue:
        """A queue that each step's events are put into; None ends it. Give it to `stop` afterwards. Raises WatchError."""
        if len(self._queues) >= MAX_WATCHERS:
            raise WatchError(f"{MAX_WATCHERS} others watch this engine already.")
        queue: WatchQueue = asyncio.Queue(MAX_STEPS_BEHIND + 1)
        self._queues.add(queue)
        try:
            if not await self._client.watch_scheduler_async():
                raise WatchError("This engine has no scheduler that could be watched.")
        except BaseException:
            await self.stop(queue)
            raise
        return queue

    async def stop(self, queue: WatchQueue) -> None:
        """This watcher has left; after the last one the engine is silent again."""
        self._queues.discard(queue)
        if not self._queues and not self._closed:
            await self._client.unwatch_scheduler_async()

    def publish(self, events: list[bytes]) -> None:
        """One step's events, for all who watch. Never waits: whoever is too far behind is let go."""
        for queue in list(self._queues):
            if queue.qsize() < MAX_STEPS_BEHIND:
                queue.put_nowait(events)
            else:
                self._queues.discard(queue)
                _end(queue)

    def close(self) -> None:
        """The engine is gone: every watcher's stream ends."""
        self._closed = True
        for queue in self._queues:
            _end(queue)


def _end(queue: WatchQueue) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
