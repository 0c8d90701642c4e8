"""Threads that API keys share fairly: work waits by key, and the keys take turns.

A plain pool of threads is first come, first served: one key that asks for a hundred things at once makes all others wait for the last
of them. Here a key waits for the work in progress, and for one piece of work of each other key.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from stage02_server.middleware import TENANT

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple["Future[T]", Callable[[], T]]


class TurnsByKey(ThreadPoolExecutor):
    """A pool of threads, as asyncio takes it. `TENANT` says whose work is submitted; without keys all of it has one queue, as
    usual.

    Each piece of work is announced to the pool once, and for each announcement a thread takes what is next in turn. Invariant: as many
    announcements as pieces of work wait; no queue is empty.
    """

    def __init__(self, max_workers: int | None = None, name: str = "turns") -> None:
        super().__init__(max_workers, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int | None, deque[Job]] = OrderedDict()  # the key whose turn is next comes first

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `Executor.submit`. Cancelled work is not begun."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(TENANT.get(), deque()).append((future, partial(fn, *args, **kwargs)))
        super().submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            key, waiting = self._waiting.popitem(last=False)
            future, work = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting  # at the end: the others have their turns first
        do(future, work)


def do(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work, unless it was cancelled, and tell the future how it ended."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
