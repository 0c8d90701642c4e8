"""Blocks of a folder, read before they are needed. One thread reads: API keys take turns block by block, and within a key its HTTP requests do. So a slow
disk that many requests of one key ask delays a request of another by as many blocks as that has itself. No torch."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_parts import part_bytes
from stage03_engine.core.features.kv_transfer.block_store import WholeBlocks
from stage03_engine.core.features.turns.turns import Asker, Turns
from stage03_engine.core.request import Request
from stagetrace.ids import root_of

logger = logging.getLogger(__name__)


class Found(msgspec.Struct):
    """Blocks of one request, read from the folder: `blocks[0]` is its block number `first`. The thread adds to them until `is_over`."""

    first: int
    num_bytes: int  # that it takes, or may take while it is being read
    blocks: list[bytes] = []
    is_over: bool = False


class Reading(msgspec.Struct):
    """What is still to be read for a request."""

    asker: Asker
    found: Found
    hashes: list[bytes]
    done: Future[None]


class Reader(Protocol):
    """What brings blocks, in a thread: from a folder, or from another engine."""

    def read(self, request: Request, found: Found, hashes: list[bytes]) -> Future[None]:
        """Bring these blocks in order, as many as there are. `found` has them when the future is done, and some of them before."""

    def end(self, found: Found) -> None:
        """Nothing more is added to it."""

    def shutdown(self) -> None:
        """End the thread."""


class BlockReader:
    """Reads from a folder in a thread. All methods but the thread's own belong to one thread, the engine's."""

    def __init__(self, store: WholeBlocks) -> None:
        self._store, self._lock, self._closed = store, Lock(), False
        self._turns: Turns[Reading] = Turns()
        self._thread = ThreadPoolExecutor(1, "kv-reader")

    def read(self, request: Request, found: Found, hashes: list[bytes]) -> Future[None]:
        """Read these blocks in order, up to the first that is missing. `found` has them when the future is done, and some of them before."""
        done, asker = Future[None](), Asker(request.tenant, root_of(request.request_id))
        done.set_running_or_notify_cancel()
        with self._lock:
            self._turns.add(asker, Reading(asker, found, hashes, done))
        self._thread.submit(self._work)
        return done

    def end(self, found: Found) -> None:
        """Nothing more is added to it."""
        with self._lock:
            found.is_over = True

    def _work(self) -> None:
        """In the thread: block by block, until nobody waits for one."""
        while (reading := self._next()) is not None:
            try:
                data = self._store.read(reading.hashes[len(reading.found.blocks)])
            except BaseException as error:
                reading.done.set_exception(error)
                continue
            self._add(reading, data)

    def _next(self) -> Reading | None:
        with self._lock:
            while self._turns and not self._closed:
                if not (reading := self._turns.pop()).found.is_over:
                    return reading
        return None

    def _add(self, reading: Reading, data: bytes | None) -> None:
        """Keep a block; the turn passes on."""
        found = reading.found
        with self._lock:
            if data is not None and not found.is_over:
                found.blocks.append(data)
                if len(found.blocks) < len(reading.hashes):
                    self._turns.add(reading.asker, reading)
                    return
        reading.done.set_result(None)

    def shutdown(self) -> None:
        """End the thread, once it comes back from the disk."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def folder_reader(config: VllmConfig) -> BlockReader:
    """The reader of the folder of `--kv-transfer-config`. Raises ConfigError."""
    store = WholeBlocks(config)
    if store.only_of_others():
        logger.warning(
            "%s has KV-cache blocks of other models or settings only (weights, number format, block size, how many workers): none is found",
            config.kv_transfer_config.path,
        )
    return BlockReader(store)


class ReadAhead:
    """What a reader has for requests that wait, in `kv_buffer_size` bytes: a request for whose blocks there is no memory is computed."""

    def __init__(self, config: VllmConfig, reader: Reader) -> None:
        self._room, self._block_bytes = config.kv_transfer_config.buffer_bytes, sum(part_bytes(config))
        self._reader = reader
        self._found: dict[str, Found] = {}
        self._reading: dict[str, Future[None]] = {}
        self.num_bytes = 0  # in _found, and what is being read may become

    def ask(self, request: Request, first: int, hashes: list[bytes], may_wait: bool) -> Future[None] | int:
        """How many of the blocks with these hashes, the request's from number `first` on, are at hand; a Future if they are still being read. Whether they are
        there is for the thread to see: a slow disk must not hold up the steps."""
        request_id = request.request_id
        if request_id not in self._found and not self._begin(request, first, hashes):
            return 0
        found, reading = self._found[request_id], self._reading.get(request_id)
        if reading is not None:
            if may_wait and not reading.done():
                return reading
            self._end(request_id)
            self.num_bytes += sum(map(len, found.blocks)) - found.num_bytes
            found.num_bytes = sum(map(len, found.blocks))
        return len(found.blocks)

    def _begin(self, request: Request, first: int, hashes: list[bytes]) -> bool:
        wanted = hashes[: max(0, self._room - self.num_bytes) // self._block_bytes]
        if wanted:
            found = self._found[request.request_id] = Found(first, len(wanted) * self._block_bytes)
            self.num_bytes += found.num_bytes
            self._reading[request.request_id] = self._reader.read(request, found, wanted)
        return bool(wanted)

    def _end(self, request_id: str) -> None:
        """Nothing more is added to what was read."""
        if (reading := self._reading.pop(request_id, None)) is not None:
            self._reader.end(self._found[request_id])
            if reading.done():
                reading.result()  # raises what nobody expected

    def knows(self, request_id: str) -> bool:
        """Is something at hand for it, or being read?"""
        return request_id in self._found

    def take(self, request_id: str, first: int, count: int) -> list[bytes]:
        """The request's blocks from number `first` on; all others are given up."""
        found = self._found.get(request_id)
        blocks = found.blocks[first - found.first :][:count] if found and count else []
        self.drop(request_id)
        return blocks

    def drop(self, request_id: str) -> None:
        """Give up what was read for a request, or may still be."""
        self._end(request_id)
        if (found := self._found.pop(request_id, None)) is not None:
            self.num_bytes -= found.num_bytes

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError."""
        assert self._found.keys() <= waiting, "blocks were read for a request that does not wait"
        assert self._reading.keys() <= self._found.keys()
        assert self.num_bytes == sum(found.num_bytes for found in self._found.values()), "bytes are lost"

    def shutdown(self) -> None:
        """End the thread, once it comes back from the disk."""
        self._reader.shutdown()
