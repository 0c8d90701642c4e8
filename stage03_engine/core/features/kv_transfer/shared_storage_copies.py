"""The worker's side of a folder of blocks: bytes into the KV cache, and out of it into files (vLLM: SharedStorageConnector).

A thread writes the files, straight from the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.model_runner import ModelRunner

logger = logging.getLogger(__name__)


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


class FolderWriter:
    """Writes blocks into the folder. One that cannot be written is not there later, and nothing else is wrong."""

    def __init__(self, config: VllmConfig) -> None:
        self._store = BlockStore.of(config)
        self._warned = False

    def holds(self, block_hash: bytes) -> bool:
        """Is it there, and whole?"""
        return self._store.read(block_hash) is not None

    def write(self, block_hash: bytes, data: bytes) -> None:
        """The first failure is a line in the log."""
        try:
            self._store.write(block_hash, data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                logger.warning("KV-cache blocks cannot be written to %s: %s", self._store.folder, why)


class SharedStorageConnectorWorker(KVConnectorWorker):
    """Copies between the KV cache and the folder."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._writer = FolderWriter(config)

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Copy what the scheduler's side has read into its place."""
        for block, data in loads:
            assert isinstance(data, bytes)
            block_from_bytes(self.runner.kv_caches, block, data)

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """Write them in the thread."""
        for block, block_hash, _ in saves:
            self.save_in_thread([block], self._save, block, block_hash)

    def _save(self, block: int, block_hash: bytes) -> None:
        """In the thread. A block that is there was computed all the same: because an earlier one is missing, or because its file is damaged and must be
        written again."""
        if not self._writer.holds(block_hash):
            self._writer.write(block_hash, block_to_bytes(self.runner.kv_caches, block))
