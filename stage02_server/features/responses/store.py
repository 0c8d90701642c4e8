"""The responses that can be retrieved, in memory and bounded (vllm/entrypoints/openai/responses/store.py; there the store
is unbounded and therefore off by default)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError, not_found
from stage02_server.features.responses.protocol import InputItem
from stage02_server.features.responses.protocol_output import ResponsesResponse
from stagetrace import trace

MAX_STORED_CHARACTERS = 64 * 2**20  # of all responses of all keys together, besides the bound on their number


class EventLog:
    """The events of a stream that goes on without its readers. Event i has sequence number i."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    def append(self, event: bytes) -> None:
        """One more event; the readers wake up."""
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        """There will be no more."""
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

    response: ResponsesResponse
    items: list[InputItem]  # the output comes last when it is there; without instructions
    log: EventLog | None = None  # only of a background response that is streamed
    task: asyncio.Task[None] | None = field(default=None, repr=False)  # only of a background response
    # Makes the last event if the server ends before.
    cut: Callable[[Exception], bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        """True until its status is final."""
        return self.response.status in ("queued", "in_progress")

    @property
    def characters(self) -> int:
        """Its approximate size. Earlier items count in each response that continues them."""
        log = sum(len(event) for event in self.log.events) if self.log else 0
        answer = len(self.response.model_dump_json())  # it repeats tools, instructions and schemas of the request
        return answer + log + sum(item.characters for item in self.items)


class ResponseStore:
    """The last `max_responses` responses of one API key, in its part of the characters. Those that still run are never
    forgotten."""

    def __init__(self, max_responses: int, num_keys: int = 1) -> None:
        self._max_responses, self._max_characters = max_responses, MAX_STORED_CHARACTERS // num_keys
        self._entries: dict[str, StoredResponse] = {}  # oldest first
        self._sizes: dict[str, int] = {}  # characters of each; those that have changed last come last

    @property
    def enabled(self) -> bool:
        """False with --max-stored-responses 0."""
        return self._max_responses > 0

    def add(self, entry: StoredResponse) -> None:
        """Keep a response, and forget the oldest ones if there is no room. Raises APIError when everything still runs."""
        running = [name for name, other in self._entries.items() if other.running]
        full = sum(self._sizes[name] for name in running) > self._max_characters
        if entry.running and (full or len(running) >= self._max_responses):
            message = f"{len(running)} background responses are running; cancel one or wait for it."
            raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        self._entries[entry.response.id] = entry
        self.update_size(entry)

    def update_size(self, entry: StoredResponse) -> None:
        """Count a changed entry again, and make room."""
        name = entry.response.id
        self._sizes.pop(name, None)
        self._sizes[name] = entry.characters
        evicted, total = 0, sum(self._sizes.values())
        for other in list(self._sizes):
            if len(self._entries) <= self._max_responses and total <= self._max_characters:
                break
            if not self._entries[other].running:
                del self._entries[other]
                total -= self._sizes.pop(other)
                evicted += 1
        if trace.on:
            trace.emit("response.stored", response=name, status=entry.response.status, evicted=evicted)

    def get(self, response_id: str, param: str) -> StoredResponse:
        """Raises APIError: 400 for what cannot be the id of a response, 404 for one that is not stored, or no longer."""
        if not response_id.startswith("resp_"):
            raise APIError(400, "BadRequestError", f"{param} must be the id of a response, resp_...", param)
        if response_id not in self._entries:
            raise not_found(f"The response `{response_id}` does not exist, or this server has forgotten it.", param)
        return self._entries[response_id]
