"""What executors with worker processes have in common (vllm/v1/executor/abstract.py, collective_rpc)."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.distributed.worker_messages import decode_output, encode
from stage03_engine.core.kv_cache_size import CPU_DEFAULT_BYTES
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.worker import Executor
from stage03_engine.errors import ConfigError
from stagetrace import trace


class SeveralWorkers(Executor):
    """A call goes to all workers and waits for all. A step goes to all and waits for the output rank only.

    Several steps may be in flight: `begin_step` hands one to the workers, `finish_step` waits for the oldest.
    """

    block_bytes: list[int]
    """Of each worker: bytes of one KV-cache block."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        every = all_ranks(config)
        self.lanes = [lane_of(config, each) for each in every]
        self._output_rank = next(each.rank for each in every if each.is_last_stage)
        self._in_flight: deque[tuple[int, Any]] = deque()  # number of a step, what `send_step` returned

    @abstractmethod
    def call_all(self, method: str, argument: int | None = None) -> list[int]:
        """Call a method of every worker. Returns the results by rank. Raises what a worker raised."""

    @abstractmethod
    def send_step(self, payload: bytes, cause: bytes) -> Any:
        """Hand an encoded decision to the workers, who run decisions in order. Returns what `receive_step` needs. Raises WorkerDiedError."""

    @abstractmethod
    def receive_step(self, sent: Any) -> tuple[bytes, bytes]:
        """The encoded output of a step, from the output rank, and its cause. Raises WorkerDiedError, and what a worker raised."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Hand a decision to the workers. Raises WorkerDiedError."""
        payload, step, cause = encode(scheduler_output), scheduler_output.step, None
        if trace.on:
            cause = trace.emit("executor.step_sent", step=step, bytes=len(payload), workers=len(self.lanes))
        self._in_flight.append((step, self.send_step(payload, (cause or "").encode())))

    def finish_step(self) -> ModelRunnerOutput:
        """The output of the oldest step that has begun. Raises WorkerDiedError, and what a worker raised."""
        step, sent = self._in_flight.popleft()
        payload, cause = self.receive_step(sent)
        if trace.on:
            trace.emit("executor.output_received", step=step, cause=cause.decode() or None, bytes=len(payload))
        return decode_output(payload)

    def kv_block_bytes(self) -> int:
        return max(self.block_bytes)

    def determine_available_memory(self) -> int:
        smallest = min(self.call_all("determine_available_memory"))
        return share_of_memory(self.config, smallest, self.config.parallel_config.local_world_size)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.call_all("initialize_kv_cache", num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.begin_step(scheduler_output)
        return self.finish_step()


def all_ranks(config: VllmConfig) -> list[Ranks]:
    """The places of an engine's workers."""
    parallel = config.parallel_config
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return [Ranks(rank, *sizes) for rank in range(parallel.world_size)]


def lane_of(config: VllmConfig, ranks: Ranks) -> str:
    """A worker's name in the trace and the log. Those of several engines have the number of theirs, vLLM's way: Worker_DP0_TP0."""
    engine = getattr(config.observability_config, "engine_index", None)
    return ranks.lane if engine is None else ranks.lane.replace("Worker", f"Worker_DP{engine}", 1)


def threads_each(config: VllmConfig, num_workers: int) -> int | None:
    """Compute threads of each of the workers that share this machine's processor; None if torch is to choose."""
    threads = config.device_config.num_threads
    return None if threads is None else max(1, threads // num_workers)


def share_of_memory(config: VllmConfig, available: int, num_workers: int) -> int:
    """Bytes for one worker's KV cache. On a CPU every worker measures the same memory, so each gets its share: of that, or of what an
    engine takes by default if that is less."""
    if config.device_config.device != "cpu" or num_workers == 1:
        return available
    return min(available, CPU_DEFAULT_BYTES) // num_workers


def check_devices(config: VllmConfig, num_workers: int) -> None:
    """Raises ConfigError for fewer GPUs than workers."""
    if config.device_config.device == "cuda" and torch.cuda.device_count() < num_workers:
        found = torch.cuda.device_count()
        raise ConfigError(
            f"tensor_parallel_size x pipeline_parallel_size is {num_workers}: each worker needs a GPU, and torch finds {found}"
        )
