"""The watchers of the scheduler, which share one stream of its events (vLLM has no counterpart).

The engine sends its events while there is at least one watcher.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from stage03_engine.errors import EngineDeadError
from stage03_engine.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.core_client import AsyncEngineCoreClient

MAX_WATCHERS = 16
MAX_STEPS_BEHIND = 1024  # a watcher that falls further behind is dropped, and may reconnect


WatchQueue = asyncio.Queue[list[bytes] | None]
"""Each item is one step's events, as lines of JSON; None is the end."""


_ID = re.compile(rb'"(req|first|needed_by)":"([^"]+)"')  # ids hold no character that JSON escapes


def without_ids(line: bytes, secret: bytes) -> bytes:
    """An event with a hash in the place of each request id; equal ids have equal hashes."""

    def hashed(match: re.Match[bytes]) -> bytes:
        digest = hashlib.blake2b(match[2], digest_size=8, key=secret).hexdigest()
        return b'"%s":"%s"' % (match[1], digest.encode())

    return _ID.sub(hashed, line)


class WatchError(Exception):
    """This engine cannot be watched, or has too many watchers."""


class EngineWatch:
    """Hands each step's events to every watcher, each with a bounded queue of its own; a listener of AsyncLLM.

    `hides_ids`: who watches must not learn by which ids others know their requests.
    """

    def __init__(self, client: AsyncEngineCoreClient, hides_ids: bool = False) -> None:
        self._client = client
        self._secret = secrets.token_bytes(32) if hides_ids else None
        self._queues: set[WatchQueue] = set()
        self._closed = False

    @classmethod
    def of(cls, engine: AsyncLLM, hides_ids: bool = False) -> EngineWatch:
        """The one that listens to this engine, added when the first watcher comes."""
        for listener in engine.listeners:
            if isinstance(listener, cls):
                return listener
        watch = cls(engine.engine_core, hides_ids)
        engine.listeners.append(watch)
        return watch

    async def start(self) -> WatchQueue:
        """A queue that each step's events are put into; None ends it. Give it to `stop` afterwards. Raises WatchError."""
        if len(self._queues) >= MAX_WATCHERS:
            raise WatchError(f"{MAX_WATCHERS} others watch this engine already.")
        queue: WatchQueue = asyncio.Queue(MAX_STEPS_BEHIND + 1)
        self._queues.add(queue)
        try:
            if not await self._client.call("watch_scheduler"):
                raise WatchError("This engine has no scheduler that could be watched.")
        except BaseException:
            await self.stop(queue)
            raise
        return queue

    async def stop(self, queue: WatchQueue) -> None:
        """Remove a watcher; after the last one the engine sends no more events."""
        self._queues.discard(queue)
        if not self._queues and not self._closed:
            with suppress(EngineDeadError):
                await self._client.call("unwatch_scheduler")

    def received(self, outputs: EngineCoreOutputs) -> None:
        """Pass one step's events on to every watcher. Never waits: a watcher that is too far behind is dropped."""
        if outputs.trace_events:
            self.publish(outputs.trace_events)

    def publish(self, events: list[bytes]) -> None:
        """Put these events into every queue."""
        if self._secret is not None:
            events = [without_ids(line, self._secret) for line in events]
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
