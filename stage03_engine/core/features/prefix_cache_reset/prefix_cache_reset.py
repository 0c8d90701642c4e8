"""Forget all cached prefixes: `POST /reset_prefix_cache` (vllm/v1/core/sched/scheduler.py, reset_prefix_cache). No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage03_engine.core.scheduler import Scheduler
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore


def reset_prefix_cache(core: EngineCore) -> bool:
    """Does nothing and returns False while a request holds blocks."""
    return reset(core.scheduler)


def reset(scheduler: Scheduler) -> bool:
    """As `reset_prefix_cache`, for a scheduler without an engine."""
    done = scheduler.kv_cache_manager.block_pool.reset()
    if trace.on:
        trace.emit("kv.reset", done=done)
    return done
