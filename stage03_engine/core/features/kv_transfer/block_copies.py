"""Between the model runner and a KV connector: the blocks of a step into the cache before the model runs, and out of it afterwards."""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import KVConnectorWorker, Transfers
from stage03_engine.core.features.kv_transfer.connector import TRANSFERS, WRITTEN, Written
from stage03_engine.core.features.kv_transfer.connectors import make_connector
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stagetrace import trace

WAIT_SECONDS = 0.05  # of a step that computes nothing; a request that arrives during it waits at most this long


class BlockCopiesHook(RunnerHook):
    """Installed with `--kv-transfer-config`, and with `--kv-offloading-size`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._connector = make_connector(config.kv_transfer_config.worker_side, KVConnectorWorker, runner, config)

    def cache_allocated(self, num_blocks: int) -> None:
        """Raises ConfigError if there is not enough memory for the connector's own."""
        self._connector.register_kv_caches()

    def received(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Load what the scheduler found, before any hook reads it."""
        transfers = TRANSFERS.of(scheduler_output.extras)
        if transfers is not None and transfers.loads:
            self._connector.start_load_kv(transfers.loads)
            if trace.on:
                blocks = [block for block, _ in transfers.loads]
                trace.emit("kv_transfer.loaded", step=scheduler_output.step, blocks=blocks)
        return scheduler_output

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """Save what is full now, drafts' keys and values too: their hook comes before this one. Says which earlier blocks are saved."""
        transfers = TRANSFERS.of(scheduler_output.extras) or Transfers()
        self._connector.save_kv_blocks(transfers.saves)
        self._connector.withdraw(transfers.withdrawn)
        self._connector.told(transfers.told)
        idle = not scheduler_output.num_scheduled_tokens
        if blocks := self._connector.get_finished(WAIT_SECONDS if idle else 0):
            WRITTEN.put(output.extras, Written(blocks))

    def shutdown(self) -> None:
        """Save what is left."""
        self._connector.shutdown()
