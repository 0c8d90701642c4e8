"""Asks the system for the memory of the next blocks while nothing else runs.

The KV cache takes no memory before it is written (`model_runner.zeros`), and the system clears each page when that happens: in the middle of a
prompt, for a tenth of its time. vLLM writes its whole cache at start, which takes seconds and all of the memory.
"""

from __future__ import annotations

import ctypes
from threading import Lock, Thread

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stage04_kernels.backends.native.library import function
from stagetrace import trace


class PrefaultHook(RunnerHook):
    """Keeps as many blocks ready as one step can take. New blocks come in order, so the highest that a request has says how far they are used."""

    observes = True

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._ahead = -(-config.scheduler_config.max_num_batched_tokens // runner.block_size)  # blocks
        self._num_blocks = self._ready = self._used = 0  # the blocks before these
        self._busy, self._lock = False, Lock()

    def cache_allocated(self, num_blocks: int) -> None:
        """The first blocks."""
        self._num_blocks, self._ready, self._used = num_blocks, 0, 0
        self._go_on()

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Requests may have taken more than half of what was ready."""
        if self._ready == self._num_blocks:
            return
        for new in scheduler_output.scheduled_new_reqs:
            self._used = max(self._used, 1 + max(new.block_ids, default=-1))
        for block_ids in scheduler_output.new_block_ids.values():
            self._used = max(self._used, 1 + max(block_ids, default=-1))
        if self._ready - self._used < self._ahead // 2:
            self._go_on()

    def _go_on(self) -> None:
        """One thread at a time, which ends when it has caught up. It holds the tensors, and the process may end under it."""
        with self._lock:
            if not self._busy:
                self._busy = True
                Thread(target=self._run, name="prefault", daemon=True).start()

    def _run(self) -> None:
        while piece := self._next():
            self._prefault(*piece)

    def _next(self) -> tuple[int, int] | None:
        """The first block and the one after the last; None if they are ready."""
        with self._lock:
            first, end = max(self._ready, self._used), min(self._used + self._ahead, self._num_blocks)
            self._busy = first < end
            self._ready = max(self._ready, end)
            return (first, end) if self._busy else None

    def _prefault(self, first: int, end: int) -> None:
        """The keys and the values of each layer lie in one piece, block by block."""
        halves = [half[first:end] for cache in self.runner.kv_caches for half in cache]
        if not halves:
            return  # the engine ended before the system let the thread run
        starts = (ctypes.c_void_p * len(halves))(*(half.data_ptr() for half in halves))
        function("prefault", "pll")(ctypes.addressof(starts), len(halves), halves[0].nbytes)
        if trace.on:
            trace.emit("kv_cache.prefault", first=first, end=end, bytes=len(halves) * halves[0].nbytes)
