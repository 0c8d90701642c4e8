"""The server's end of the processes that decode sound (process.py has the other end)."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError
from stage02_server.features.audio.pieces import SAMPLE_RATE
from stage02_server.features.child_process.child import ChildProcess
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
AT_ONCE = 2  # files of all clients
MOST_UPLOADS = 64  # files of one client that arrive, or wait on the disk: 25 MiB each
CPU_SECONDS = 60.0  # for one file: what the limits allow takes about 15
SILENT_SECONDS = 2 * CPU_SECONDS  # after which the process has been stopped, or gets no turn


class SoundDecoder:
    """One process, which starts with the first file, and is replaced when it has ended. Its methods wait: call them in a
    thread. They raise InvalidRequestError whatever the file does."""

    def __init__(self, max_seconds: int, cpu_seconds: float = CPU_SECONDS) -> None:
        self._child = ChildProcess("stage02_server.features.audio.process", str(max_seconds), str(cpu_seconds))

    def begin(self, data: bytes) -> int:
        """How many samples the sound has. `finish` must follow."""
        import numpy  # noqa: F401 - here, in the thread, the import holds up nobody

        if not self._child.runs:
            self._child.start()
        try:
            with self._child.pipes(SILENT_SECONDS) as (to, answers):
                to.write(len(data).to_bytes(8, "little"))
                to.write(data)
                to.flush()
                line = answers.readline()
            problem, length = json.loads(line or b"null") or (self._why_it_ended(), 0)
        except OSError:  # of a pipe whose other end is gone
            problem, length = self._why_it_ended(), 0
        if problem:
            raise InvalidRequestError(problem, "file")
        return length

    def finish(self, samples: np.ndarray | None) -> None:
        """Fill the samples, float32; None drops the sound."""
        rest = memoryview(b"") if samples is None else samples.data.cast("B")
        try:
            with self._child.pipes(SILENT_SECONDS) as (to, answers):
                to.write(b"\1" if rest else b"\0")
                to.flush()
                while rest and (taken := answers.readinto(rest)):  # type: ignore[attr-defined]
                    rest = rest[taken:]
        except OSError:
            pass
        if rest:
            raise InvalidRequestError(self._why_it_ended(), "file")

    def kill(self) -> None:
        """End what runs, from any thread."""
        self._child.kill()

    def _why_it_ended(self) -> str:
        return "file takes too long to be decoded." if self._child.end() else "file cannot be decoded."


class SoundDecoders:
    """Sound of all clients: two files are decoded at a time, and one of each client. What is held of all requests is bounded
    too: `max_seconds` of sound are 64 kB each."""

    def __init__(self, max_seconds: int) -> None:
        self._max_held = 2 * max_seconds * SAMPLE_RATE
        self._held: dict[int, int] = {}  # number of a sound in memory -> its samples
        self._count = 0
        self._uploads: Counter[str] = Counter()  # client -> files that are not decoded yet
        self._threads = ThreadPoolExecutor(AT_ONCE, "decode")
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._free: asyncio.Queue[SoundDecoder] = asyncio.Queue()
        for _ in range(AT_ONCE):
            self._free.put_nowait(SoundDecoder(max_seconds))

    @contextmanager
    def upload(self, client: str) -> Iterator[None]:
        """While a file arrives, and waits for its turn on the disk. Raises APIError 429 for one too many of this client."""
        if self._uploads[client] >= MOST_UPLOADS:
            message = f"{MOST_UPLOADS} files of this client arrive, or wait to be decoded; send this one later."
            raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        self._uploads[client] += 1
        try:
            yield
        finally:
            self._uploads[client] -= 1
            if not self._uploads[client]:
                del self._uploads[client]

    async def decode(self, client: str, read: Callable[[], Awaitable[bytes]]) -> np.ndarray:
        """The sound of a file as float32 [num_samples], mono, 16,000 samples per second. The file is read when it is its
        turn. Raises InvalidRequestError, and APIError 429 if there is no room for so much sound."""
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Lock()
        async with turn:
            decoder = await self._free.get()
            try:
                length = await self._in_thread(decoder, partial(decoder.begin, await read()))
                try:
                    samples = self._room_for(length)
                except APIError:
                    await self._in_thread(decoder, partial(decoder.finish, None))
                    raise
                await self._in_thread(decoder, partial(decoder.finish, samples))
                return samples
            finally:
                self._free.put_nowait(decoder)

    async def _in_thread(self, decoder: SoundDecoder, work: Callable[[], T]) -> T:
        """The result of `work` with the decoder. If it is cancelled, because the client has left, the decoder's process is
        ended first: a turn is over only when nothing is left of it."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            decoder.kill()
            await asyncio.wait({working})
            working.exception()  # it is read by nobody else
            raise

    def _room_for(self, length: int) -> np.ndarray:
        """Memory for sound, counted until its request is answered. Raises APIError 429 if there is no room for it."""
        import numpy as np

        held = sum(list(self._held.values()))  # a list, as a thread may let go meanwhile
        if held + length > self._max_held:
            message = (
                f"The server holds {held / SAMPLE_RATE:.0f} seconds of sound already, and with this file it would be more than "
                f"{self._max_held / SAMPLE_RATE:.0f} (twice --max-audio-seconds); try again later."
            )
            raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        samples = np.empty(length, np.float32)
        self._count += 1
        self._held[self._count] = length
        weakref.finalize(samples, self._held.pop, self._count)  # the pieces are views, so they keep it alive
        return samples
