"""Decode steps of few requests without Python between the calls of native.cpp: CUDA graphs' idea, on a CPU.

Only with few requests: with many the products take so long that what Python needs does not show. `--enforce-eager` switches it off; the
tokens are the same, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from stage03_engine.core.features.cuda_graphs.cuda_graphs import DecodeGraphs
from stage03_engine.core.hooks import RunnerHook
from stage03_engine.core.input_batch import StepInputs
from stage04_kernels.attention import AttentionMetadata
from stage04_kernels.backends.native.attention import FUNCTIONS
from stage04_kernels.backends.native.graph import NotRecordableError, record
from stagetrace import trace

logger = logging.getLogger(__name__)
MOST_REQUESTS = 8  # each size has memory of its own for all results of a step: together 0.5 MB x 36 for GPT-2


def one_token_each(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same step, in which each token is a request with one token, and sees as much as before: a layer writes all keys and values before it
    reads any."""
    starts, count = metadata.query_start_loc_cpu, len(metadata.slot_mapping)
    lengths = [end - start for start, end in pairwise(starts)]
    seen = [end - left for end, length in zip(metadata.seq_lens_cpu, lengths) for left in range(length - 1, -1, -1)]
    requests = [request for request, length in enumerate(lengths) for _ in range(length)]
    each = np.arange(count + 1, dtype=np.int32)
    return AttentionMetadata(
        torch.from_numpy(each), torch.from_numpy(np.array(seen, dtype=np.int32)),
        torch.from_numpy(metadata.block_table.numpy()[requests]), metadata.slot_mapping, each.tolist(), seen, 1, max(seen),
    )  # fmt: skip


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
        """Replay a step of few tokens. Where a request has several, its drafts or the end of its prompt, each counts as a request of its own."""
        if self.graphs is None or not inputs.replayable:
            return run(inputs)
        several = inputs.metadata.max_query_len > 1 and len(inputs.input_ids) <= MOST_REQUESTS
        metadata = one_token_each(inputs.metadata) if several else inputs.metadata
        if not self.graphs.fits(metadata):
            return run(inputs)
        return self.graphs.forward(inputs.input_ids, inputs.positions, metadata)

    def shutdown(self) -> None:
        """Release the recordings."""
        self.graphs = None
