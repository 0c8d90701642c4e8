"""All stages of a pipeline in one process, behind the methods of an executor: the same workers, scheduler and core as in several processes,
without starting any. What crosses a process boundary there is encoded and decoded here too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed import manifest, parallel_state, stage_ends
from stage03_engine.core.features.distributed.rank_config import rank_config
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.worker import Executor, Worker

SENT: deque[torch.Tensor] = deque()
_decode = msgspec.msgpack.Decoder(SchedulerOutput).decode


class PipelineInProcess(Executor):
    """A worker per stage. All but the last run a step when it begins, the last one when its results are wanted."""

    def __init__(self, config: VllmConfig) -> None:
        size = config.parallel_config.pipeline_parallel_size
        self.workers = [_worker(config, Ranks(rank, 1, size)) for rank in range(size)]
        self._in_flight: deque[tuple[bytes, deque[torch.Tensor]]] = deque()

    def kv_block_bytes(self) -> int:
        return max(kv_block_bytes(worker.config) for worker in self.workers)

    def determine_available_memory(self) -> int:
        SENT.clear()
        return min(worker.determine_available_memory() for worker in self.workers)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        for worker in self.workers:
            worker.initialize_kv_cache(num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        raise AssertionError("a pipeline begins steps before others have finished")

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        message = msgspec.msgpack.encode(scheduler_output)
        SENT.clear()
        for worker in self.workers[:-1]:
            assert not worker.execute_model(_decode(message)).sampled_token_ids, "an earlier stage sampled"
        self._in_flight.append((message, SENT.copy()))

    def finish_step(self) -> ModelRunnerOutput:
        message, sent = self._in_flight.popleft()
        SENT.clear()
        SENT.extend(sent)
        ran = self.workers[-1].execute_model(_decode(message))
        assert not SENT, "the last stage did not take what was sent"
        return ran

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


def _worker(config: VllmConfig, own: Ranks) -> Worker:
    parallel_state._ranks = own
    try:
        worker = Worker(rank_config(config, own))
        worker.load_model()
    finally:
        parallel_state._ranks = Ranks()
    return worker


def _send(x: torch.Tensor, linked: bool) -> None:
    SENT.append(x)


def _receive(like: torch.Tensor, linked: bool) -> torch.Tensor:
    sent = SENT.popleft()
    assert (sent.shape, sent.dtype) == (like.shape, like.dtype)
    return sent.clone()  # what is received is the receiver's own


@contextmanager
def stages_in_this_process() -> Iterator[None]:
    """In this block an engine with several pipeline stages runs them all in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(manifest.EXECUTORS, "mp", f"{__name__}:PipelineInProcess")
        patch.setattr(stage_ends, "send_to_next_stage", _send)
        patch.setattr(stage_ends, "receive_from_previous_stage", _receive)
        yield
