"""The smallest connector: blocks of keys and values in a dictionary, which only grows. How to write one of your own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import (
    FullBlock,
    KVConnectorScheduler,
    KVConnectorWorker,
    Match,
    Transfers,
)
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler


class DictScheduler(KVConnectorScheduler):
    """Knows which blocks the worker's side has."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self._saved: set[bytes] = set()
        self._saving: dict[int, bytes] = {}  # block -> its hash
        self._loads: list[tuple[int, bytes | int]] = []  # of the step that is being decided

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int, may_wait: bool) -> Match:
        """All blocks without a gap. The last token is always computed: its logits are needed."""
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        end = first
        while end < last and request.block_hashes[end] in self._saved:
            end += 1
        return Match(first * self.block_size, (end - first) * self.block_size)

    def update_state_after_alloc(self, request: Request, blocks: list[int], first: int) -> None:
        """A block is loaded by its hash."""
        self._loads += zip(blocks, request.block_hashes[first // self.block_size :])

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """Save what is new."""
        new = [each for each in full if each.block_hash not in self._saved][:room]
        self._saving.update((each.block, each.block_hash) for each in new)
        loads, self._loads = self._loads, []
        return Transfers(loads, [(each.block, each.block_hash, -1) for each in new])

    def update_connector_output(self, saved: list[int]) -> None:
        """From now on they can be promised."""
        self._saved.update(self._saving.pop(block) for block in saved)


class DictWorker(KVConnectorWorker):
    """Has the blocks."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._blocks: dict[bytes | int, list[Tensor]] = {}  # hash -> a block of each layer

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Into the cache."""
        for block, block_hash in loads:
            for cache, kept in zip(self.runner.kv_caches, self._blocks[block_hash], strict=True):
                cache[:, block].copy_(kept)

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """In the thread."""
        if saves:
            self.save_in_thread([block for block, *_ in saves], self._save, saves)

    def _save(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        for block, block_hash, _ in saves:
            self._blocks[block_hash] = [cache[:, block].clone() for cache in self.runner.kv_caches]
