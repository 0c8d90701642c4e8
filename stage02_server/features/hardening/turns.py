"""Threads that clients share fairly: work waits by API key, without several keys by address, and these take turns.

A plain pool of threads is first come, first served: one client that asks for a hundred things at once makes all others wait for the last
of them. Here a client waits for the work in progress, and for one piece of work of each other client.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import ParamSpec, TypeVar

from stage02_server.middleware import TENANT

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple["Future[T]", Callable[[], T]]
ADDRESS: ContextVar[str] = ContextVar("address", default="")
"""Where the request being served comes from (for IPv6, its /64); empty for a Unix socket."""


def asker() -> int | str:
    """Who takes a turn with what is submitted now: the key, where there are several, else the address."""
    tenant = TENANT.get()
    return ADDRESS.get() if tenant is None else tenant


class TurnsByKey(ThreadPoolExecutor):
    """A pool of threads, as asyncio takes it. `asker` says whose work is submitted.

    Each piece of work is announced to the pool once, and for each announcement a thread takes what is next in turn. Invariant: as many
    announcements as pieces of work wait; no queue is empty.
    """

    def __init__(self, max_workers: int | None = None, name: str = "turns") -> None:
        super().__init__(max_workers, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int | str, deque[Job]] = OrderedDict()  # whose turn is next comes first

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `Executor.submit`. Cancelled work is not begun."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(asker(), deque()).append((future, partial(fn, *args, **kwargs)))
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
