"""Workers of which one takes its time to copy blocks: it is not the one that answers."""

from __future__ import annotations

import time

from stage03_engine.core.features.distributed.parallel_state import ranks
from stage03_engine.core.features.kv_transfer.offloading_copies import OffloadingConnectorWorker
from stage03_engine.core.worker import Worker


class SlowRank(Worker):
    """Its thread is late with every block."""

    def load_model(self) -> None:
        own = ranks()
        if not (own.is_last_stage and own.tp_rank == 0):
            save = OffloadingConnectorWorker._save

            def late(connector: OffloadingConnectorWorker, saves: object) -> None:
                time.sleep(0.02)
                save(connector, saves)  # type: ignore[arg-type]

            OffloadingConnectorWorker._save = late  # type: ignore[method-assign]
        super().load_model()
