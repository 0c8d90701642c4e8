"""The executor: runs a step on the workers (vllm/v1/executor/abstract.py, uniproc_executor.py).

Popular descriptions of vLLM call this CudaExecutor; no such class exists. One worker in the same process is
UniProcExecutor; several worker processes would be MultiprocExecutor, behind these same five methods.
"""

from __future__ import annotations

from stage03_engine.config import VllmConfig
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.worker import Worker
from stagetrace import trace


class UniProcExecutor:
    """One worker, called directly."""

    def __init__(self, config: VllmConfig) -> None:
        self.worker = Worker(config)
        if trace.on:
            trace.emit("executor.created", kind="UniProcExecutor")
        self.worker.load_model()

    def kv_block_bytes(self) -> int:
        """Bytes of one KV-cache block over all layers."""
        return self.worker.kv_block_bytes()

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take, after weights and the largest possible step."""
        return self.worker.determine_available_memory()

    def initialize_kv_cache(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Allocate the KV cache, and its swap space in CPU memory."""
        self.worker.initialize_kv_cache(num_blocks, num_swap_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self.worker.execute_model(scheduler_output)

    def shutdown(self) -> None:
        """Release the worker's memory."""
        self.worker.shutdown()
