"""The worker (one device, its memory, its model runner), and the executor, which runs a step on the workers.

Source: vllm/v1/worker/gpu_worker.py, cpu_worker.py; v1/executor/abstract.py, uniproc_executor.py. Popular descriptions of vLLM
call the executor CudaExecutor; no such class exists. One worker in the same process is UniProcExecutor; several worker processes are
MultiprocExecutor, with the same methods (core/features/distributed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import psutil
import torch

from stage03_engine.config import VllmConfig
from stage03_engine.core.kv_cache_size import NO_ROOM, kv_block_bytes
from stage03_engine.core.model_runner import ModelRunner
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find
from stage04_kernels.attention import check_backend
from stagetrace import trace


class Worker:
    """Owns a device. Raises ConfigError if there is no such device."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        name = config.device_config.device
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no usable GPU; use --device cpu")
        self.device = torch.device(name)
        if name == "cpu" and config.device_config.num_threads is not None:
            torch.set_num_threads(config.device_config.num_threads)
        try:
            check_backend(config.device_config.attention_backend, name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.model_runner = ModelRunner(config, self.device)
        if trace.on:
            dtype, threads = config.model_config.dtype, torch.get_num_threads()
            trace.emit("worker.created", device=name, dtype=dtype, threads=threads)

    def load_model(self) -> None:
        """Load the weights."""
        self.model_runner.load_model()

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache = total memory x gpu_memory_utilization - what is in use at the peak of the largest step:
        on a GPU by all processes, in a CPU's memory by this one."""
        utilization = self.config.cache_config.gpu_memory_utilization
        measure = find("engine", "measure_activations")
        activations = 0 if measure is None else measure(self.model_runner)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            used = total - free + activations
        else:  # other programs share this memory: they limit what is free, but only our own use counts
            free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
            used = psutil.Process().memory_info().rss + activations
        available = max(0, min(int(total * utilization) - used, free))
        if trace.on:
            trace.emit("memory.profiled", total=total, used=used, utilization=utilization, available=available)
        return available

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache. Raises ConfigError if there is not enough memory."""
        try:
            self.model_runner.initialize_kv_cache(num_blocks)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:  # ValueError: too many bytes for numpy
            raise ConfigError(NO_ROOM.format(num_blocks)) from error

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self.model_runner.execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Release the KV cache and the weights."""
        self.model_runner.shutdown()


class Executor(ABC):
    """Runs the steps of an engine core on its workers (vllm/v1/executor/abstract.py)."""

    @staticmethod
    def get_class(config: VllmConfig) -> type[Executor]:
        """UniProcExecutor, unless a setting puts another class into its place."""
        return config.chosen("executor", UniProcExecutor)

    @abstractmethod
    def __init__(self, config: VllmConfig) -> None:
        """Start the workers and load the weights. Raises ConfigError."""

    @abstractmethod
    def kv_block_bytes(self) -> int:
        """Bytes of one KV-cache block over all layers of a worker."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes left for a worker's KV cache, after weights and the largest possible step."""

    @abstractmethod
    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""

    def on_failure(self, report: Callable[[str], None]) -> None:  # noqa: B027 - a worker in this process cannot die alone
        """From now on `report(why)` is called, from any thread, when a worker has died."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and release their memory."""


class UniProcExecutor(Executor):
    """One worker, called directly."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.worker = config.chosen("worker", Worker)(config)
        if trace.on:
            trace.emit("executor.created", kind="UniProcExecutor")
        self.worker.load_model()

    def kv_block_bytes(self) -> int:
        return kv_block_bytes(self.config)

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.worker.initialize_kv_cache(num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(scheduler_output)

    def shutdown(self) -> None:
        self.worker.shutdown()
