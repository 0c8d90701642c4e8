"""The thread that reads blocks: API keys take turns block by block, and within a key its HTTP requests do. So a slow disk that many requests of one
key ask delays a request of another by as many blocks as that has itself. No torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import msgspec

from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.turns.turns import Asker, Turns


class Found(msgspec.Struct):
    """Blocks of one request, read from the folder: `blocks[0]` is its block number `first`. The thread adds to them until `is_over`."""

    first: int
    num_bytes: int  # that it takes, or may take while it is being read
    blocks: list[bytes] = []
    late_at: float = 0.0  # on the clock of `monotonic`
    is_over: bool = False


class Reading(msgspec.Struct):
    """What is still to be read for a request."""

    asker: Asker
    found: Found
    hashes: list[bytes]
    done: Future[None]


class BlockReader:
    """Reads from a folder in a thread. All methods but the thread's own belong to one thread, the engine's."""

    def __init__(self, store: BlockStore) -> None:
        self._store, self._lock, self._closed = store, Lock(), False
        self._turns: Turns[Reading] = Turns()
        self._thread = ThreadPoolExecutor(1, "kv-reader")

    def read(self, asker: Asker, found: Found, hashes: list[bytes]) -> Future[None]:
        """Read these blocks in order, up to the first that is missing. `found` has them when the future is done, and some of them before."""
        done = Future[None]()
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
