"""SIGTERM and SIGINT as events of the event loop (vllm/entrypoints/launcher.py, signal_handler)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """A signal came before the server was up."""


class StopSignals:
    """`first` is set by the first signal, whose name is `name`; `second` by the next one."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.name = ""

    def _received(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        self.name = self.name or number.name
        self.first.set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to the signals inside the `with` block. If one came they are ignored from then on: the process is about to
        end, and one more must not end it half-way, with another exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._received, number)
        try:
            yield
        finally:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # none may come in between
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                if self.first.is_set():
                    signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises StopRequested, and cancels it, when a signal comes first."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self.first.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StopRequested
            return working.result()
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)
