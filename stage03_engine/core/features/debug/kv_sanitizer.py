"""Run each step under guard mode (`--check-invariants` with `--attention-backend triton-interpret`). vLLM has no counterpart.

The scheduler keeps the books of who owns which block, the worker has a copy of them in its block tables, and the kernel reads
through the copy. Here the kernel's reads are held against the books.
"""

from __future__ import annotations

from collections.abc import Callable

from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from stage04_kernels.lab.guard import BlockOwners, guard

Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


def sanitized(execute: Execute, manager: KVCacheManager) -> Execute:
    """The same, but a step in which a kernel reads a foreign block, out of bounds or fresh memory raises AssertionError."""

    def guarded(output: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(output.num_scheduled_tokens)
        owned = [set(manager.block_table(request_id)) for request_id in request_ids]
        with guard(BlockOwners(owned, request_ids, output.step)) as report:
            result = execute(output)
        assert not report.findings, f"step {output.step}: {report}"
        return result

    return guarded
