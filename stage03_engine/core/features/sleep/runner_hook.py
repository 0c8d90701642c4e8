"""The workers' side of sleeping: what is given back, and how it comes again (vllm/v1/worker/gpu_worker.py, Worker.sleep; CuMemAllocator).

As in vLLM, tensors stay where they are and lose their memory: whoever holds one, a recording of a step or a product of packed weights, still
holds it after waking. After level 2 the weights are loaded and packed as they were at start, and all that was built on them is built again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.sleep.memory import Away, tensors_in
from stage03_engine.core.features.sleep.messages import KV_CACHE, ORDER, TAGS, WEIGHTS, Order
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stagetrace import trace


def forget_garbage() -> None:
    """The engine froze its first model out of the garbage collector's sight; the one that took its place goes there instead."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class SleepRunnerHook(RunnerHook):
    """Installed with `--enable-sleep-mode`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._level = 0
        self._asleep: dict[str, Away] = {}

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Do what the scheduler's side orders."""
        if (order := ORDER.of(scheduler_output.extras)) is not None:
            with torch.inference_mode(False):  # as at start
                self._sleep(order.level) if order.level else self._wake(order)
        return scheduler_output

    def _sleep(self, level: int) -> None:
        """Level 2 may follow level 1."""
        self._level = level
        if KV_CACHE not in self._asleep:
            self._asleep[KV_CACHE] = Away(self._caches(), keep=False)
        if level == 2:
            self._asleep[WEIGHTS] = Away(self._weights(), keep=False)
        elif self.runner.device.type != "cpu":
            self._asleep[WEIGHTS] = Away(self._weights(), keep=True)
        else:
            self._asleep[WEIGHTS] = Away((), keep=True)  # they lie in the CPU's memory already
        if trace.on:
            away = {tag: self._asleep[tag].nbytes for tag in TAGS}
            trace.emit("sleep.memory", released=away, taken=[], seconds=0.0)

    def _wake(self, order: Order) -> None:
        """After level 2 the KV cache is there when both are: what is built on the weights comes between."""
        started = time.monotonic()
        for tag in [each for each in order.wake if each in self._asleep]:  # an earlier try may have come so far
            if self._level == 1:
                self._asleep[tag].come_back()
            elif tag == WEIGHTS:
                self.runner.load_model()
                forget_garbage()
            del self._asleep[tag]  # not before: what failed may be tried again
        if self._level == 2 and not self._asleep:
            self.runner.initialize_kv_cache(order.num_blocks)
        if trace.on:
            seconds = round(time.monotonic() - started, 4)
            trace.emit("sleep.memory", released={}, taken=list(order.wake), seconds=seconds)

    def _caches(self) -> Iterator[torch.Tensor]:
        yield from self.runner.kv_caches
        for hook in self.runner.hooks:
            yield from hook.kv_caches

    def _weights(self) -> Iterator[torch.Tensor]:
        """Of the model, and of one that drafts."""
        yield from tensors_in(self.runner.model)
        for hook in self.runner.hooks:
            if isinstance(draft := getattr(hook, "draft", None), ModelRunner):
                yield from tensors_in(draft.model)
