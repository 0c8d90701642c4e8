"""The worker's side of the folder: blocks into the KV cache before the model runs, and out of it afterwards (vLLM: start_load_kv, save_kv_layer).

A thread writes the files, straight from the cache: the scheduler leaves the blocks alone until it hears that they are written.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.kv_transfer.connector import TRANSFERS, WRITTEN, Transfers, Written
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stagetrace import trace

logger = logging.getLogger(__name__)
WAIT_SECONDS = 0.05  # of a step that computes nothing; a request that arrives during it waits at most this long


class BlockCopiesHook(RunnerHook):
    """Installed with `--kv-transfer-config`."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        super().__init__(runner, config)
        self._store = BlockStore.of(config)
        self._writer = ThreadPoolExecutor(1, "kv-writer")
        self._writing: dict[Future[None], int] = {}  # -> the block
        self._warned = False

    def batch_updated(self, scheduler_output: SchedulerOutput) -> None:
        """Copy what the scheduler found into its place."""
        transfers = TRANSFERS.of(scheduler_output.extras)
        if transfers is None or not transfers.loads:
            return
        for block, data in transfers.loads:
            # [num_layers, 2, block_size, num_kv_heads, head_dim]
            layers = torch.frombuffer(bytearray(data), dtype=self.runner.kv_caches[0].dtype).view(
                len(self.runner.kv_caches), 2, *self._of(block, 0).shape[1:]
            )
            for number, layer in enumerate(layers):
                self._of(block, number).copy_(layer)
        if trace.on:
            blocks = [block for block, _ in transfers.loads]
            trace.emit("kv_transfer.loaded", step=scheduler_output.step, blocks=blocks)

    def _of(self, block: int, layer: int) -> torch.Tensor:
        return self.runner.kv_caches[layer][:, block]

    def collect(self, output: ModelRunnerOutput, scheduler_output: SchedulerOutput) -> None:
        """The step's blocks are full: write them. Says which earlier ones are written."""
        for block, block_hash in (TRANSFERS.of(scheduler_output.extras) or Transfers()).saves:
            self._writing[self._writer.submit(self._write, block, block_hash)] = block
        if self._writing and not scheduler_output.num_scheduled_tokens:  # there is nothing else to do
            wait(self._writing, WAIT_SECONDS, FIRST_COMPLETED)
        done = [writing for writing in self._writing if writing.done()]
        if done:
            for writing in done:
                writing.result()  # raises what nobody expected
            WRITTEN.put(output.extras, Written([self._writing.pop(writing) for writing in done]))

    def _write(self, block: int, block_hash: bytes) -> None:
        """In the thread. A block that cannot be written is not there later, and nothing else is wrong. One that is there was computed all the
        same: because an earlier one is missing, or because its file is damaged and must be written again."""
        if self._store.read(block_hash) is not None:
            return
        layers = torch.stack([cache[:, block] for cache in self.runner.kv_caches]).cpu()
        try:
            self._store.write(block_hash, layers.view(torch.uint8).numpy().tobytes())
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "KV-cache blocks cannot be written to %s: %s", self._store.folder, error.strerror or error
                )

    def shutdown(self) -> None:
        """Write what is left."""
        self._writer.shutdown()
