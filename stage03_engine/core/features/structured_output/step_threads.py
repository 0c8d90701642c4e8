"""Threads that move grammars on, within one budget for each step of the engine.

A mask takes some microseconds or, in a grammar made for it, as long as llguidance lets it. Hundreds of requests may need one at the same
time. So a step waits for all of them together, no longer than its budget. The threads begin a job only while a step waits for
them; what is left keeps its place, and the next step goes on with it. Jobs have turns (turns.py).

Some jobs take a second or more: llguidance's limits count the items of an ambiguous grammar, and not the ways to each. So
a job is waited for once, and no later step waits for it again; and in the long run steps wait for the jobs of one API key no longer than
they take without that, so it slows another key down to half its speed at most. With several keys each has half of the threads, so another
always finds one. A job that takes too long is given up, but cannot be stopped: its thread still counts for its key, and without keys there
are at most twice as many threads. All step back for whatever else wants to compute (nice).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING

from stage03_engine.core.features.turns.turns import Asker, Turns

if TYPE_CHECKING:
    from stage03_engine.core.features.structured_output.backend_guidance import GrammarState

MAX_THREADS = 8
NICE = 5  # a third of a busy core, beside the engine's own threads


def clock_of_this_thread() -> int:
    """It runs while this thread computes: a busy machine makes no grammar too complex. Where there is none (macOS), one that always runs."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return time.CLOCK_MONOTONIC if clock_of is None else clock_of(threading.get_ident())


@dataclass(eq=False)
class Job:
    """One state to find."""

    work: Callable[[], GrammarState]
    clock: int | None = None  # of the thread that took it; None: it is queued
    began: float = 0.0  # by that clock
    state: GrammarState | None = None  # the result; None after the end: it took too long
    dropped: bool = False  # nobody waits for it any more
    tenant: int | None = None  # the API key whose turn it had
    missed: bool = False  # a step has waited for it already


class StepThreads:
    """As many threads as cores, from two to MAX_THREADS. All methods but the threads' own belong to one thread, the engine's.

    Invariant: no thread begins a job outside of `run`.
    """

    def __init__(self, seconds_per_job: float) -> None:
        self.seconds_per_job = seconds_per_job
        self._lock = Lock()
        self._work, self.news = Condition(self._lock), Condition(self._lock)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most_threads = max(2, min(cores, MAX_THREADS))
        self._queue: Turns[tuple[Asker, Job]] = Turns()
        self._running: set[Job] = set()
        self._held: Counter[int | None] = Counter()  # API key -> threads that work for it, or were given up
        self._resting: set[int | None] = set()  # keys that hold as many threads as they may
        self._done: list[Job] = []
        self._until = 0.0  # the end of the step's budget
        self._debts: dict[
            int | None, float
        ] = {}  # API key -> seconds that steps have waited for it, less those between the waits
        self._waited_until = 0.0  # when the last of these waits was over
        self._num_threads = 0
        self._closed = False

    def add(self, asker: Asker, job: Job) -> None:
        """Queue a job for the next `run`. One that several ask for has a place with each; the first turn counts."""
        with self._lock:
            self._queue.add(asker, (asker, job))

    def run(self, seconds: float, enough: Callable[[], bool] | None = None) -> None:
        """Let the threads work, `seconds` at most, until all is done that a step has not waited for already, or `enough`, which is
        asked again after each of the `news`. Without `enough` it is a step that waits, and for a key whose debt is `seconds` it does not."""
        with self._lock:
            now = time.monotonic()
            end = now + seconds
            if self._queue:
                self._start_threads()
                self._until = end
                self._work.notify_all()
            if enough is None:
                self._wait_for_keys(now, end)
            else:
                while not enough() and (left := end - time.monotonic()) > 0:
                    self.news.wait(left)
            self._until = 0.0

    def _wait_for_keys(self, now: float, end: float) -> None:
        most, gap = end - now, now - self._waited_until
        self._debts = {key: debt - gap for key, debt in self._debts.items() if debt > gap}
        while now < end and (keys := {key for key in self._promising() if self._debts.get(key, 0.0) < most}):
            self.news.wait(min(end - now, most - min(self._debts.get(key, 0.0) for key in keys)))
            waited, now = time.monotonic() - now, time.monotonic()
            for key in keys:
                self._debts[key] = self._debts.get(key, 0.0) + waited
        self._waited_until = now
        for job in self._running:
            job.missed = True

    def _promising(self) -> set[int | None]:
        """The keys of which a job may end, or begin, that no step has waited for."""
        keys = {job.tenant for job in self._running if not job.missed}
        if len(self._running) < self._num_threads:
            keys |= self._queue.tenants - self._resting
        return keys

    @property
    def has_done(self) -> bool:
        """Is there a job for `take_done`?"""
        return bool(self._done)

    @property
    def busy(self) -> bool:
        """Is anything queued or running?"""
        return bool(self._queue or self._running)

    def take_done(self) -> list[Job]:
        """What has ended since: with a state, or without one because its thread has computed for longer than `seconds_per_job`."""
        with self._lock:
            late = [job for job in self._running if self._is_late(job)]
            self._running.difference_update(late)
            self._num_threads -= len(late)  # each is lost until llguidance comes back, and others take the place
            done, self._done = self._done + late, []
        return done

    def _is_late(self, job: Job) -> bool:
        return job.clock is not None and time.clock_gettime(job.clock) - job.began > self.seconds_per_job

    def _start_threads(self) -> None:
        while self._num_threads < self._most_threads:
            self._num_threads += 1
            Thread(target=self._serve, name="grammar-step", daemon=True).start()

    def _hold(self, tenant: int | None, number: int) -> None:
        """A thread begins (1) or ends (-1) a job of this key."""
        self._held[tenant] += number
        most = 2 * self._most_threads if tenant is None else self._most_threads // 2
        (self._resting.add if self._held[tenant] >= most else self._resting.discard)(tenant)

    def _serve(self) -> None:
        """One thread."""
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICE)
        from stage03_engine.core.features.structured_output.backend_guidance import GrammarState

        while (job := self._next()) is not None:
            try:
                state = job.work()
            except BaseException:  # a panic of llguidance is not even an Exception
                state = GrammarState(b"", failed="cannot be followed: the grammar compiler failed")
            with self._lock:
                self._hold(job.tenant, -1)
                self._work.notify_all()  # perhaps the key may begin another
                if job not in self._running:  # it was given up, and this thread with it
                    return
                self._running.remove(job)
                job.state = state
                self._done.append(job)
                self.news.notify_all()

    def _next(self) -> Job | None:
        with self._lock:
            while not self._closed:
                while self._queue.tenants - self._resting and time.monotonic() < self._until:
                    asker, job = self._queue.pop(self._resting)
                    if not job.dropped and job.clock is None:
                        job.clock, job.tenant = clock_of_this_thread(), asker.tenant
                        job.began = time.clock_gettime(job.clock)
                        self._running.add(job)
                        self._hold(asker.tenant, 1)
                        return job
                self.news.notify_all()  # perhaps all is done
                self._work.wait()
        return None

    def shutdown(self) -> None:
        """End the threads, each after its job."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
