"""The worker's side of a folder of blocks: bytes into the KV cache, and out of it into files (vLLM: SharedStorageConnector).

A thread writes the files, straight from the cache; one of several workers copies its part first (`save_in_thread`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker
from stage03_engine.core.features.kv_transfer.block_parts import num_workers, part_bytes, part_of
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def own_rank(config: VllmConfig) -> int:
    """This worker's."""
    if num_workers(config) == 1:
        return 0
    from stage03_engine.core.features.distributed.parallel_state import ranks

    return ranks().rank


def block_from_bytes(kv_caches: Sequence[Tensor], block: int, data: bytes) -> None:
    """Fill a block."""
    shape = kv_caches[0][:, block].shape  # [2, block_size, num_kv_heads, head_dim]
    layers = torch.frombuffer(bytearray(data), dtype=kv_caches[0].dtype).view(len(kv_caches), *shape)
    for cache, layer in zip(kv_caches, layers, strict=True):
        cache[:, block].copy_(layer)


def block_to_bytes(kv_caches: Sequence[Tensor], block: int) -> bytes:
    """What `block_from_bytes` reads."""
    layers = torch.stack([cache[:, block] for cache in kv_caches]).cpu()
    data: bytes = layers.view(torch.uint8).numpy().tobytes()
    return data


class Folder:
    """This worker's parts of blocks: into files, and out of what the scheduler's side has read. One that cannot be written is not there later, and nothing else
    is wrong. Raises ConfigError."""

    def __init__(self, config: VllmConfig) -> None:
        rank = own_rank(config)
        self._store, self._part = BlockStore.of(config, rank), part_of(config, rank)
        self._warned = False
        self._most_waiting = config.kv_transfer_config.buffer_bytes // sum(part_bytes(config))
        self._disk = ThreadPoolExecutor(1, "kv-disk")
        self._waiting: set[Future[None]] = set()  # copies that are to be written

    def load(self, kv_caches: Sequence[Tensor], block: int, data: bytes) -> None:
        """Fill a block. `data` is that of all workers."""
        block_from_bytes(kv_caches, block, data[self._part])

    def save(self, kv_caches: Sequence[Tensor], block: int, block_hash: bytes) -> None:
        """Write a block. It may be there, and was computed all the same: because an earlier one is missing, or because its file is damaged and must be
        written again."""
        self._write_missing(block_hash, lambda: block_to_bytes(kv_caches, block))

    def save_later(self, kv_caches: Sequence[Tensor], block: int, block_hash: bytes) -> None:
        """The same from a copy, in a thread: a slow disk holds up nobody. If too many wait for it, the block is left out."""
        self._waiting = {each for each in self._waiting if not each.done()}
        if len(self._waiting) < self._most_waiting:
            data = block_to_bytes(kv_caches, block)
            self._waiting.add(self._disk.submit(self._write_missing, block_hash, lambda: data))

    def _write_missing(self, block_hash: bytes, data: Callable[[], bytes]) -> None:
        """The first failure is a line in the log."""
        try:
            if self._store.read(block_hash) is None:
                self._store.write(block_hash, data())
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                logger.warning("KV-cache blocks cannot be written to %s: %s", self._store.folder, why)

    def shutdown(self) -> None:
        """Write what is left."""
        self._disk.shutdown()


class SharedStorageConnectorWorker(KVConnectorWorker):
    """Copies between the KV cache and the folder."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._folder = Folder(config)
        self._save = self._folder.save if num_workers(config) == 1 else self._folder.save_later

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Copy what the scheduler's side has read into its place."""
        for block, data in loads:
            assert isinstance(data, bytes)
            self._folder.load(self.runner.kv_caches, block, data)

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """Write them in the thread."""
        for block, block_hash, _ in saves:
            self.save_in_thread([block], self._save, self.runner.kv_caches, block, block_hash)

    def shutdown(self) -> None:
        """Save what is left."""
        super().shutdown()
        self._folder.shutdown()
