"""Workers that are not all alike: one that does not answer takes its time to copy blocks, or finds its disk full."""

from __future__ import annotations

import os
import threading
from typing import Any

from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.features.kv_transfer import shared_storage_copies
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.kv_transfer.offloading_copies import OffloadingConnectorWorker
from stage03_engine.core.worker import Worker


class SlowRank(Worker):
    """Its thread is late with every block: it copies it when the next step has begun, or, where none comes, after a moment."""

    _step_begins = threading.Event()

    def execute_model(self, *args: Any, **more: Any) -> Any:
        self._step_begins.set()
        return super().execute_model(*args, **more)

    def _wait_for_a_step(self) -> None:
        self._step_begins.clear()
        self._step_begins.wait(0.02)

    def load_model(self) -> None:
        own = ranks()
        if not (own.is_last_stage and own.tp_rank == 0):
            save, copy = OffloadingConnectorWorker._save, shared_storage_copies.block_to_bytes

            def late(connector: OffloadingConnectorWorker, saves: object) -> None:
                self._wait_for_a_step()
                save(connector, saves)  # type: ignore[arg-type]

            def late_copy(caches: object, block: int) -> bytes:
                self._wait_for_a_step()
                return copy(caches, block)  # type: ignore[arg-type]

            OffloadingConnectorWorker._save = late  # type: ignore[method-assign, assignment]
            shared_storage_copies.block_to_bytes = late_copy  # type: ignore[assignment]
        super().load_model()


class FullDisk(Worker):
    """The ranks that FULL_DISKS names can write no block."""

    def load_model(self) -> None:
        if str(ranks().rank) in os.environ["FULL_DISKS"].split():

            def full(store: BlockStore, block_hash: bytes, data: bytes) -> None:
                raise OSError(28, "No space left on device")

            BlockStore.write = full  # type: ignore[method-assign, assignment]
        super().load_model()
