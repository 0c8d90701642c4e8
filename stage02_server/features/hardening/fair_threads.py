"""The threads that tokenize, shared fairly: work on a few characters does not wait for work on millions.

Of two threads one takes small work only, so that it is free again within milliseconds; the other takes any. Both take first what
is due first, and large work is due later. (vLLM: one thread, first come, first served.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any

SMALL = 65_536  # characters, or token ids: 15 to 60 ms
PER_SECOND = 100_000
"""Work on so many characters is due a second later than work on none that came at the same time. So large work goes after small,
but no stream of small work keeps it waiting for ever."""

Job = tuple[float, int, "Future[Any]", Callable[[], Any]]  # due (s), its number, what it becomes, what to do


class FairThreads:
    """Two threads, and the work that waits for them.

    Each piece of work is announced to every thread that may take it, and a thread takes for each announcement the work that is
    due first, or nothing. Invariant: a thread has at least as many announcements as there is work waiting that it may take.
    """

    def __init__(self, name: str) -> None:
        self._for_small, self._for_any = ThreadPoolExecutor(1, name), ThreadPoolExecutor(1, name)
        self._small: list[Job] = []  # heaps
        self._large: list[Job] = []
        self._lock, self._count = threading.Lock(), 0

    def of(self, size: int) -> Executor:
        """Where to do work on so many characters, or token ids."""
        return _Sized(self, size)

    def add(self, size: int, work: Callable[[], Any]) -> Future[Any]:
        """The result of `work` on so many characters, once a thread has done it. Cancelled work is not begun."""
        future: Future[Any] = Future()
        small = size <= SMALL
        with self._lock:
            self._count += 1
            due = time.monotonic() + size / PER_SECOND
            heappush(self._small if small else self._large, (due, self._count, future, work))
        if small:
            self._for_small.submit(self._do_next, [self._small])
        self._for_any.submit(self._do_next, [self._small, self._large])
        return future

    def _do_next(self, heaps: list[list[Job]]) -> None:
        with self._lock:
            waiting = [heap for heap in heaps if heap]
            if not waiting:
                return
            *_, future, work = heappop(min(waiting))  # of the heap whose first is due first
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

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
