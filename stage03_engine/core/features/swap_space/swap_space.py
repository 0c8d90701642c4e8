"""CPU memory for the keys and values of preempted requests (`--preemption-mode swap`).

vLLM V1 only recomputes; swapping is what its first engine did (vllm/core/block_manager.py (0.10), swap_out and swap_in). Plain
Python, no tensors: the worker does the copying.
"""

from __future__ import annotations

import msgspec
import psutil

from stage03_engine.config import VllmConfig
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.kv_cache_manager import cdiv
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.request import Request
from stage03_engine.core.sched_output import Extra, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError


class Swaps(msgspec.Struct, array_like=True):
    """What a step copies before the model runs: first out, because it may write to the blocks that are left, then back in."""

    out: list[tuple[int, int]] = []  # (block of the KV cache, CPU block)
    back: list[tuple[int, int]] = []  # (CPU block, block of the KV cache)


SWAPS = Extra("swap_space", Swaps)


def num_swap_blocks(config: VllmConfig) -> int:
    """How many blocks --swap-space has room for. Raises ConfigError if the machine has less memory than that."""
    size = config.cache_config.swap_space * (1 << 30)
    if size > psutil.virtual_memory().total:
        raise ConfigError(
            f"there is not enough memory for {config.cache_config.swap_space} GiB of swapped blocks; lower --swap-space"
        )
    return int(size) // kv_block_bytes(config)


class SwapSpace:
    """Which CPU blocks hold which request's blocks, in the order of its tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: dict[str, list[int]] = {}
        self._num_tokens: dict[str, int] = {}

    def swap_out(
        self, request_id: str, block_table: list[int], num_computed_tokens: int
    ) -> list[tuple[int, int]] | None:
        """(KV-cache block, CPU block) for all computed tokens of a request, or None when there is no room for them."""
        count = cdiv(num_computed_tokens, self._block_size)
        if count > len(self._free):
            return None
        self._held[request_id] = [self._free.pop() for _ in range(count)]
        self._num_tokens[request_id] = num_computed_tokens
        return list(zip(block_table, self._held[request_id]))

    def swap_in(self, request_id: str, block_table: list[int], num_hits: int) -> list[tuple[int, int]]:
        """(CPU block, KV-cache block) for what was swapped out, except the first `num_hits` blocks, which were found in the
        prefix cache. The CPU blocks are free from now on."""
        pairs = list(zip(self._held.get(request_id, []), block_table))[num_hits:]
        self.drop(request_id)
        return pairs

    def num_tokens(self, request_id: str) -> int:
        """How many of this request's tokens are in CPU memory."""
        return self._num_tokens.get(request_id, 0)

    def drop(self, request_id: str) -> None:
        """Forget what a request left here, if anything."""
        self._free.extend(self._held.pop(request_id, []))
        self._num_tokens.pop(request_id, None)

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError when a CPU block is lost, or held for a request that does not wait."""
        held = [block for blocks in self._held.values() for block in blocks]
        assert sorted(held + self._free) == list(range(self._num_blocks)), "a CPU block is lost or used twice"
        assert self._held.keys() <= waiting, "a CPU block is held for a request that does not wait"


class SwapHook(SchedulerHook):
    """Installed with `--preemption-mode swap`: preempted requests keep what was computed, as long as there is room."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig, num_blocks: int | None = None) -> None:
        super().__init__(scheduler, config)
        self.num_cpu_blocks = num_swap_blocks(config) if num_blocks is None else num_blocks
        self.swap_space = SwapSpace(self.num_cpu_blocks, scheduler.kv_cache_manager.block_size)
        self._swaps = Swaps()  # of the step that is being decided

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """Its blocks are copied out before the model runs, if there is room."""
        table = self.scheduler.kv_cache_manager.block_table(request.request_id)
        swapped = self.swap_space.swap_out(request.request_id, table, request.num_computed_tokens)
        self._swaps.out += swapped or []
        return swapped is not None

    def num_matched(self, request: Request, num_computed: int) -> int:
        """What was computed before it was preempted. (Its newest token may have been computed too, if that one's result was dropped.)"""
        kept = min(self.swap_space.num_tokens(request.request_id), request.num_tokens - 1)
        return max(0, kept - num_computed)

    def admitted(
        self, request: Request, output: SchedulerOutput, new_blocks: list[int], first: int, num_matched: int
    ) -> None:
        """Its blocks are copied back in."""
        num_hits = first // self.scheduler.kv_cache_manager.block_size
        self._swaps.back += self.swap_space.swap_in(request.request_id, new_blocks, num_hits)

    def decided(self, output: SchedulerOutput) -> None:
        """The worker is told what to copy."""
        if self._swaps.out or self._swaps.back:
            SWAPS.put(output.extras, self._swaps)
            self._swaps = Swaps()

    def finished(self, request: Request) -> None:
        """Its CPU blocks are free."""
        self.swap_space.drop(request.request_id)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        waiting = {request.request_id for request in self.scheduler.waiting}
        self.swap_space.check_invariants(waiting | self.scheduler.held.keys())
