"""The copies between the KV cache and CPU memory (vLLM V0: Worker.execute_worker, CacheEngine.swap_in and swap_out)."""

from __future__ import annotations

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.swap_space.swap_space import SWAPS, num_swap_blocks
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.errors import ConfigError
from stagetrace import trace


class SwapCopies(RunnerHook):
    """Installed with `--preemption-mode swap`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self.swap_caches: list[Tensor] = []  # CPU memory for preempted requests, like the runner's kv_caches

    def cache_allocated(self, num_blocks: int) -> None:
        """Raises ConfigError if there is not enough memory."""
        count = num_swap_blocks(self.config)
        try:
            self.swap_caches = self.runner.new_kv_caches(count, torch.device("cpu"))
            for hook in self.runner.hooks:
                self.swap_caches += hook.new_kv_caches(count, torch.device("cpu"))
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than numpy can count
            raise ConfigError(
                f"there is not enough memory for {num_blocks} KV-cache blocks and {count} swapped ones; lower --swap-space"
            ) from error

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Copy whole blocks."""
        swaps = SWAPS.of(scheduler_output.extras)
        if swaps is None:
            return
        kv_caches = [*self.runner.kv_caches, *(cache for hook in self.runner.hooks for cache in hook.kv_caches)]
        for pairs, sources, targets in (
            (swaps.out, kv_caches, self.swap_caches),
            (swaps.back, self.swap_caches, kv_caches),
        ):
            for source, target in zip(sources, targets, strict=True):
                for source_block, target_block in pairs:
                    target[:, target_block].copy_(source[:, source_block])
        if trace.on:
            trace.emit("kv.swapped", step=scheduler_output.step, num_out=len(swaps.out), num_in=len(swaps.back))

    def shutdown(self) -> None:
        """Release the memory."""
        self.swap_caches = []
