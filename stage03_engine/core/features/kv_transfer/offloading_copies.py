"""The worker's side of offloading: blocks of the KV cache to places in CPU memory and back (vLLM: v1/kv_offload). With a folder, from memory into files as well.

A thread copies to memory. Another one writes files, from copies of its own, so that a slow disk holds no block and no place; when too many wait for it, blocks
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker
from stage03_engine.core.features.kv_transfer.offloading import num_cpu_blocks
from stage03_engine.core.features.kv_transfer.shared_storage_copies import Folder
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.errors import ConfigError


class OffloadingConnectorWorker(KVConnectorWorker):
    """Has the memory."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._memory: list[Tensor] = []  # like the KV cache, with places for blocks
        self._folder = Folder(config) if config.kv_transfer_config.path is not None else None

    def register_kv_caches(self) -> None:
        """Also of what drafts in the same blocks. What is in memory already stays there: the scheduler's side counts on it. Raises ConfigError."""
        if self._memory:
            return
        count, cpu = num_cpu_blocks(self.runner.config), torch.device("cpu")
        try:
            self._memory = self.runner.new_kv_caches(count, cpu)
            for hook in self.runner.hooks:
                self._memory += hook.new_kv_caches(count, cpu)
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than numpy can count
            raise ConfigError(
                f"there is not enough memory for {count} offloaded KV-cache blocks; lower --kv-offloading-size"
            ) from error

    @property
    def _kv_caches(self) -> list[Tensor]:
        return [*self.runner.kv_caches, *(cache for hook in self.runner.hooks for cache in hook.kv_caches)]

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Block by block: copies so small start no threads, which would wait for a core on a busy machine."""
        places = [(block, source) for block, source in loads if isinstance(source, int)]
        for cache, memory in zip(self._kv_caches, self._memory, strict=True):
            for block, place in places:
                cache[:, block].copy_(memory[:, place])
        for block, source in loads:
            if isinstance(source, bytes):
                assert self._folder is not None
                self._folder.load(self.runner.kv_caches, block, source)

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """Copy them in the thread."""
        if saves:
            self.save_in_thread([block for block, *_ in saves], self._save, saves)

    def _save(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        for cache, memory in zip(self._kv_caches, self._memory, strict=True):
            for block, _, place in saves:
                memory[:, place].copy_(cache[:, block])
        for _, block_hash, place in saves:
            if block_hash and self._folder is not None:
                self._folder.save_later(self._memory, place, block_hash)

    def shutdown(self) -> None:
        """Save what is left, and write it."""
        super().shutdown()
        if self._folder is not None:
            self._folder.shutdown()
        self._memory = []
