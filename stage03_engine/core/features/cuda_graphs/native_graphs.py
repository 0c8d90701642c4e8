"""Decode steps of few requests without Python between the calls of native.cpp: CUDA graphs' idea, on a CPU.

Only with few requests: with many the products take so long that what Python needs does not show. `--enforce-eager` switches it off; the
tokens are the same, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from stage03_engine.core.features.cuda_graphs.cuda_graphs import DecodeGraphs
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage04_kernels.backends.native.attention import FUNCTIONS
from stage04_kernels.backends.native.graph import NotRecordableError, record
from stagetrace import trace

logger = logging.getLogger(__name__)
MOST_REQUESTS = 8  # each size has memory of its own for all results of a step: together 0.5 MB x 36 for GPT-2


class NativeGraphHook(RunnerHook):
    """Installed with `--attention-backend native` for models that generate text, without `--enforce-eager`."""

    graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def cache_allocated(self, num_blocks: int) -> None:
        """Record decode steps of 1, 2, ... requests."""
        runner = self.runner
        if runner.dtype not in FUNCTIONS:
            return
        sizes = list(range(1, min(MOST_REQUESTS, self.config.scheduler_config.max_num_seqs) + 1))
        max_blocks, length = runner.batch.block_table.shape[1], self.config.max_model_len
        started = time.monotonic()
        try:
            self.graphs = DecodeGraphs(runner.model, runner.kv_caches, max_blocks, length, sizes, runner.device, record)
        except NotRecordableError as error:
            logger.info("Decode steps are not recorded: %s", error)
            return
        if trace.on:
            trace.emit("graphs.captured", kind="native", sizes=sizes, seconds=round(time.monotonic() - started, 4))

    def forward(self, inputs: StepInputs, run: Callable[[StepInputs], torch.Tensor]) -> torch.Tensor:
        """Replay a decode step."""
        if self.graphs is None or not (inputs.replayable and self.graphs.fits(inputs.metadata)):
            return run(inputs)
        return self.graphs.forward(inputs.input_ids, inputs.positions, inputs.metadata)

    def shutdown(self) -> None:
        """Release the recordings."""
        self.graphs = None
