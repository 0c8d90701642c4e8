"""Who holds the event loop: `--event-loop-held-seconds`.

All clients share one event loop. Whatever keeps it busy without a pause keeps everybody waiting, `/health` included, and leaves no mark of
its own. So a thread asks the loop for a sign, four times per limit. When none comes within the limit, the thread notes what the loop
is executing, and for which request. When the loop answers again, that becomes a line of the log, the event `loop.held`, the metric
`stages:event_loop_held_seconds`, and for a minute a header of `/health`. (vLLM has no such watch.)

Code in C may keep the interpreter's lock as well, so that the thread cannot look either. It then looks first when that code returns,
and still finds the line that called it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Histogram

from stage02_server.api_server import Services
from stagetrace import trace

logger = logging.getLogger(__name__)
HEADER = "x-event-loop-held"  # of /health: seconds of the longest hold in the last REMEMBERED seconds
REMEMBERED = 60.0
FRAMES = 12  # innermost ones that are told
BUCKETS = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Hold:
    """One time in which the loop gave no sign."""

    seconds: float
    cpu_seconds: float  # of the loop's thread; much less than `seconds` means that the machine was busy, or that something blocked
    request: str
    where: str  # functions that were running, the innermost first
    ended: float  # on the monotonic clock


class LoopWatch:
    """Watches the event loop in which it is started, until `stop`.

    Invariant: at most one question waits for its answer. `told` is called in the loop, once per hold.
    """

    def __init__(self, limit: float, told: Callable[[Hold], None]) -> None:
        self._limit, self._told = limit, told
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = (
            time.pthread_getcpuclockid(self._thread_id) if hasattr(time, "pthread_getcpuclockid") else None
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._limit / 4):
            answered = threading.Event()
            asked, cpu = time.monotonic(), self._cpu_seconds()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            if answered.wait(self._limit) and time.monotonic() - asked < self._limit:
                continue
            request, where = self._look()
            while not answered.wait(self._limit):
                if self._stopped.is_set():
                    return
            seconds, cpu = time.monotonic() - asked, self._cpu_seconds() - cpu
            self._tell(Hold(seconds, cpu, request, where, time.monotonic()))

    def _tell(self, hold: Hold) -> None:
        try:
            self._loop.call_soon_threadsafe(self._told, hold)
        except RuntimeError:  # the loop has closed meanwhile
            pass

    def _cpu_seconds(self) -> float:
        return 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)

    def _look(self) -> tuple[str, str]:
        """The request that is being served, for which its task is named, and the functions that run."""
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        return task.get_name() if task else "no task", " < ".join(_functions(frame))


def _functions(frame: FrameType | None) -> Iterator[str]:
    for _ in range(FRAMES):
        if frame is None:
            return
        code = frame.f_code
        yield f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back


class HoldReport:
    """Tells of each hold, and remembers those of the last minute."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._held = Histogram(
            "stages:event_loop_held_seconds", "Times in which the event loop of the API server served nobody.",
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip
        self._recent: list[Hold] = []

    def told(self, hold: Hold) -> None:
        """The loop was held, and answers again."""
        self._recent = [*self._still_recent(), hold]
        self._held.observe(hold.seconds)
        logger.warning(
            "The event loop was held for %.2f s (%.2f s of CPU time) by %s: %s",
            hold.seconds, hold.cpu_seconds, hold.request, hold.where,
        )  # fmt: skip
        if trace.on:
            trace.emit(
                "loop.held", seconds=hold.seconds, cpu_seconds=hold.cpu_seconds, request=hold.request, where=hold.where
            )

    def headers(self) -> dict[str, str]:
        """What /health tells: seconds of the longest hold in the last minute; nothing if there was none."""
        self._recent = self._still_recent()
        return {HEADER: f"{max(hold.seconds for hold in self._recent):.3f}"} if self._recent else {}

    def _still_recent(self) -> list[Hold]:
        return [hold for hold in self._recent if time.monotonic() - hold.ended < REMEMBERED] if self._recent else []


def install(app: FastAPI, services: Services) -> None:
    """Watch the loop from the start of HTTP to its end."""
    report = HoldReport(services.registry)
    services.lifecycle.health_headers.append(report.headers)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            watch = LoopWatch(services.args.event_loop_held_seconds, report.told)
            watch.start()
            try:
                yield state
            finally:
                watch.stop()

    app.router.lifespan_context = watched
