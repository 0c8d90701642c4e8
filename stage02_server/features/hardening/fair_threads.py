"""The threads that tokenize, shared fairly: work on a few characters does not wait for work on millions.

Of two threads one takes small work only, so that it is free again within milliseconds; the other takes any. API keys take turns, and without
several keys addresses do; of one's work both take first what is due first, and large work is due later. (vLLM: one thread, first come, first served.)
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any

from stage02_server.features.hardening.turns import asker, do

SMALL = 65_536  # characters, or token ids: 15 to 60 ms
PER_SECOND = 100_000
"""Work on so many characters is due a second later than work on none that came at the same time. So large work goes after small,
but no stream of small work keeps it waiting for ever."""

SMALL_WORK, LARGE_WORK = 0, 1
Job = tuple[float, int, "Future[Any]", Callable[[], Any]]  # due (s), its number, what it becomes, what to do


class FairThreads:
    """Two threads, and the work that waits for them.

    Each piece of work is announced to every thread that may take it, and a thread takes for each announcement the work that is
    next, or nothing. Invariant: a thread has at least as many announcements as there is work waiting that it may take.
    """

    def __init__(self, name: str) -> None:
        self._for_small, self._for_any = ThreadPoolExecutor(1, name), ThreadPoolExecutor(1, name)
        # key or address -> its small and its large work, as heaps; whose turn is next comes first, and each has work
        self._waiting: OrderedDict[int | str, tuple[list[Job], list[Job]]] = OrderedDict()
        self._lock, self._count = threading.Lock(), 0

    def of(self, size: int) -> Executor:
        """Where to do work on so many characters, or token ids."""
        return _Sized(self, size)

    def add(self, size: int, work: Callable[[], Any]) -> Future[Any]:
        """The result of `work` on so many characters, once a thread has done it. Cancelled work is not begun."""
        future: Future[Any] = Future()
        small, key = size <= SMALL, asker()
        with self._lock:
            self._count += 1
            due = time.monotonic() + size / PER_SECOND
            heaps = self._waiting.setdefault(key, ([], []))
            heappush(heaps[SMALL_WORK if small else LARGE_WORK], (due, self._count, future, work))
        if small:
            self._for_small.submit(self._do_next, [SMALL_WORK])
        self._for_any.submit(self._do_next, [SMALL_WORK, LARGE_WORK])
        return future

    def _do_next(self, kinds: Sequence[int]) -> None:
        with self._lock:
            job = self._next_job(kinds)
        if job is not None:
            do(*job[2:])

    def _next_job(self, kinds: Sequence[int]) -> Job | None:
        for key, heaps in self._waiting.items():
            if waiting := [heaps[kind] for kind in kinds if heaps[kind]]:
                job = heappop(min(waiting))  # of the heap whose first is due first
                self._waiting.move_to_end(key)
                if not any(heaps):
                    del self._waiting[key]
                return job
        return None

    def shutdown(self) -> None:
        """End the threads, once they have done what is begun or waits."""
        self._for_small.shutdown()
        self._for_any.shutdown()


class _Sized(Executor):
    """Work of one size, as asyncio hands it to threads."""

    def __init__(self, threads: FairThreads, size: int) -> None:
        self._threads, self._size = threads, size

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`."""
        return self._threads.add(self._size, lambda: fn(*args, **kwargs))


threads_for = FairThreads("tokenize").of
"""size -> where to do work on so many characters, or token ids."""
