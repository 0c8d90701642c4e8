"""Measures each forward pass, and tells native.cpp how many threads the next one may use.

Source: none in vLLM, whose compute threads are bound to cores of their own (vllm/v1/worker/cpu_worker.py).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from time import monotonic, thread_time

from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.adaptive_threads.policy import ThreadPolicy, Window
from stage03_engine.core.features.adaptive_threads.room import Room
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage03_engine.core.model_runner import ModelRunner
from stage04_kernels.backends.native.library import limit_threads
from stagetrace import trace

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 60.0
_owner: weakref.ref[AdaptiveThreadsHook] | None = None
"""The hook that decides for this process: a model that drafts, or another engine, has the same threads."""


class AdaptiveThreadsHook(RunnerHook):
    """Installed with more than one compute thread, unless `--num-threads` is given.

    A thread that waits for the others spins for a moment, which is processor time, then sleeps, which is none; and one whose core another program has gets none
    either. So wall time over processor time of the thread that calls says how much of a step is waiting.
    """

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        global _owner
        self._decides = _owner is None or _owner() is None
        if self._decides:
            _owner = weakref.ref(self)
        most: int = config.device_config.num_threads or 1
        self.policy, self.room = ThreadPolicy(most), Room()
        self._late = 0.0  # how late the threads were when there were fewer from then on
        self._told, self._told_at = most, float("-inf")

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], Tensor]) -> Tensor:
        """As it is, timed."""
        if not self._decides:
            return run(inputs)
        start, busy = monotonic(), thread_time()
        hidden = run(inputs)
        end = monotonic()
        self._decide(Window(end - start, thread_time() - busy, 1, len(inputs.input_ids)), end)
        return hidden

    def _decide(self, step: Window, now: float) -> None:
        """A step is over."""
        policy = self.policy
        before = policy.threads
        threads = policy.decide(step, self.room.now() if before < policy.most else None)
        if threads != before:
            limit_threads(threads)
            self._late = policy.late if threads < before else self._late
            if trace.on:
                late, why = round(policy.late, 2), policy.why
                trace.emit("threads.changed", before=before, threads=threads, late=late, trial=policy.trying, why=why)
        if threads != self._told and not policy.trying and now - self._told_at >= SECONDS_BETWEEN_LINES:
            self._tell(threads)
            self._told, self._told_at = threads, now

    def _tell(self, threads: int) -> None:
        if threads < self._told:
            logger.info(
                "Other work has the cores: a forward pass took %.1f times as long as it computed, so %d of %d compute threads go on; "
                "more are tried now and then (--num-threads %d keeps them all)", self._late, threads, self.policy.most, self.policy.most,
            )  # fmt: skip
        else:
            logger.info("%d of %d compute threads again", threads, self.policy.most)

    def shutdown(self) -> None:
        """Another engine in this process begins with all."""
        global _owner
        if self._decides:
            _owner = None
            limit_threads(None)
