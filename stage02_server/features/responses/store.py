"""The responses that can be retrieved, in memory and bounded (vllm/entrypoints/openai/responses/serving.py, response_store; there the store
is unbounded and therefore off by default)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, fields

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError, not_found
from stage02_server.features.responses.encoded import memory_of
from stage02_server.features.responses.maker import ResponseMaker
from stage02_server.features.responses.protocol_output import Status
from stage03_engine.messages import EngineCoreRequest
from stagetrace import trace

LOG_STEP = 2**20  # bytes of events after which a log that grows is counted again
POINTER = 8  # bytes of a place in a list
ENDED_BYTES = 4096  # what a response takes in objects that hold nothing which clients choose
APART = ("log", "task", "maker")  # fields whose objects hold more than is kept for this response
RUNNING_BYTES = 16384  # the same of one that runs, with its task and its engine request


class EventLog:
    """The events of a stream that goes on without its readers. Event i has sequence number i."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_bytes = 0
        self._ended = False
        self._news = asyncio.Event()

    def append(self, event: bytes) -> None:
        """One more event; the readers wake up."""
        self.events.append(event)
        self.num_bytes += sys.getsizeof(event) + POINTER
        self._wake()

    def end(self) -> None:
        """No more events will come."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, position: int) -> AsyncGenerator[bytes, None]:
        """The events from number `position` on, including those to come."""
        while True:
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self._ended:
                return
            await self._news.wait()


@dataclass
class StoredResponse:
    """A response, the conversation that led to it, and the work on it if it runs in the background."""

    maker: ResponseMaker | None  # None when it has ended
    # the conversation as JSON (encoded.py); the output comes last when it is there; without instructions
    items: list[bytes]
    engine_requests: list[EngineCoreRequest]  # of one that runs in the background
    body: bytes = b""  # the response as JSON, when it has ended
    status: Status = "queued"
    log: EventLog | None = None  # only of a background response that is streamed
    task: asyncio.Task[None] | None = field(default=None, repr=False)  # only of a background response
    id: str = field(init=False)
    size: int = field(init=False)  # bytes of memory, without the log

    def __post_init__(self) -> None:
        assert self.maker is not None
        self.id, self._cut = self.maker.progress.id, b""
        self.size = self._measured()

    @property
    def running(self) -> bool:
        """True until its status is final."""
        return self.maker is not None

    @property
    def state(self) -> Status:
        """Its status now."""
        return self.status if self.maker is None else self.maker.progress.status

    @property
    def whole(self) -> bytes:
        """The response as it is now, as JSON."""
        return self.body if self.maker is None else self.maker.whole

    @property
    def num_bytes(self) -> int:
        """What it takes in memory. Earlier items count in each response that continues them."""
        return self.size + (self.log.num_bytes if self.log else 0)

    def cut(self, error: Exception) -> bytes:
        """The last event of its stream when the server ends; nothing if the stream has had its last event."""
        return self._cut if self.maker is None else self.maker.cut(error)

    def end(self, output: list[bytes], body: bytes, status: Status) -> None:
        """Its status is final: from now on it is bytes only."""
        assert self.maker is not None
        self._cut = self.maker.cut_event
        self.items = [*self.items, *output]
        self.maker, self.engine_requests, self.body, self.status = None, [], body, status
        self.size = self._measured()

    def _measured(self) -> int:
        """Of all fields, and of what the work on it holds, whatever fields there are. The log counts itself."""
        size = ENDED_BYTES + memory_of(
            [getattr(self, each.name, None) for each in fields(self) if each.name not in APART]
        )
        if self.maker is not None:  # the last event of its beginning stays in the frames of those who pass it on
            size += RUNNING_BYTES + memory_of(self.maker.progress) + 2 * memory_of(self.maker.encoded)
        return size


class ResponseStore:
    """The last `max_responses` responses of one API key, and `max_bytes` of them at most. Those that still run are never
    forgotten."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._entries: dict[str, StoredResponse] = {}  # oldest first
        self._order: dict[str, None] = {}  # their names; those that have changed last come last

    @property
    def enabled(self) -> bool:
        """False with --max-stored-responses 0."""
        return self._max_responses > 0

    def add(self, entry: StoredResponse) -> None:
        """Keep a response, and forget the oldest ones if there is no room. Raises APIError when everything still runs."""
        running = [other for other in self._entries.values() if other.running]
        full = bool(running) and sum(other.num_bytes for other in [*running, entry]) > self._max_bytes
        if entry.running and (full or len(running) >= self._max_responses):
            message = f"{len(running)} background responses are running; cancel one or wait for it."
            raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        self._entries[entry.id] = entry
        self.changed(entry)

    def changed(self, entry: StoredResponse) -> None:
        """It has come or ended: it is the newest now. Make room."""
        self._order.pop(entry.id, None)
        self._order[entry.id] = None
        evicted = self.make_room()
        if trace.on:
            trace.emit("response.stored", response=entry.id, status=entry.state, evicted=evicted)

    def make_room(self) -> int:
        """Forget the oldest ones that have ended, until the others are few and small enough; returns how many."""
        evicted, total = 0, sum(entry.num_bytes for entry in self._entries.values())
        for name in list(self._order):
            if len(self._entries) <= self._max_responses and total <= self._max_bytes:
                break
            if not (entry := self._entries[name]).running:
                del self._entries[name], self._order[name]
                total -= entry.num_bytes
                evicted += 1
        return evicted

    def remove(self, response_id: str) -> None:
        """Forget one that has ended, if it is not forgotten yet."""
        self._entries.pop(response_id, None)
        self._order.pop(response_id, None)

    def get(self, response_id: str, param: str) -> StoredResponse:
        """Raises APIError: 400 for what cannot be the id of a response, 404 for one that is not stored, or no longer."""
        if not response_id.startswith("resp_"):
            raise APIError(400, "BadRequestError", f"{param} must be the id of a response, resp_...", param)
        if response_id not in self._entries:
            raise not_found(f"The response `{response_id}` does not exist, or this server has forgotten it.", param)
        return self._entries[response_id]
