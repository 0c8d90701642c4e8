"""The worker's side of blocks that travel between engines: a thread sends them from where they are, the KV cache; those that have come are copied into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker
from stage03_engine.core.features.kv_transfer.shared_storage_copies import block_from_bytes, block_to_bytes
from stage03_engine.core.features.p2p_connector.block_server import BlockServer
from stage03_engine.core.features.p2p_connector.p2p import LISTENING
from stage03_engine.core.model_runner import ModelRunner


class P2pZmqConnectorWorker(KVConnectorWorker):
    """Keeps blocks in use until a consumer has them."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._engine_id, self._num_kept = config.kv_transfer_config.engine_id, 0
        self._server: BlockServer | None = None
        if config.kv_transfer_config.saves:
            self._server = self.make_server(config, lambda block: block_to_bytes(self.runner.kv_caches, block))
            LISTENING[self._engine_id] = self._server.port

    @staticmethod
    def make_server(config: VllmConfig, read: Callable[[int], bytes]) -> BlockServer:
        """The producer's end of the links."""
        return BlockServer(config, read)

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Copy what the scheduler's side has fetched into its place."""
        for block, data in loads:
            assert isinstance(data, bytes)
            block_from_bytes(self.runner.kv_caches, block, data)

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """They can be asked for from now on, while the next blocks are computed."""
        if saves and self._server is not None:
            self._num_kept += len(saves)
            self._server.offer(saves)

    def withdraw(self, places: Sequence[int]) -> None:
        """They are free, once the thread does not read them any more."""
        if places and self._server is not None:
            self._server.withdraw(places)

    def told(self, places: Sequence[int]) -> None:
        """They are given up if nobody asks for them soon."""
        if places and self._server is not None:
            self._server.told(places)

    def get_finished(self, wait_seconds: float) -> list[int]:
        """Those that a consumer has, or nobody wants."""
        if self._server is None:
            return []
        freed = self._server.freed(wait_seconds if self._num_kept else 0)
        self._num_kept -= len(freed)
        return freed

    def shutdown(self) -> None:
        """The engine ends; whoever asks for blocks notices it."""
        super().shutdown()
        if self._server is not None:
            LISTENING.pop(self._engine_id, None)
            self._server.shutdown()
