"""Forget all cached prefixes: `POST /reset_prefix_cache` (vllm/v1/core/sched/scheduler.py, reset_prefix_cache). No torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stage03_engine.core.scheduler import Scheduler
from stagetrace import trace

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore

SETTLE_SECONDS = 10.0


@runtime_checkable
class KeepsMore(Protocol):
    """A scheduler's hook that keeps what the weights made of prompts besides blocks."""

    def prefixes_forgotten(self) -> None:
        """Nothing that was kept is used again: the weights may be others."""


def reset_prefix_cache(core: EngineCore) -> bool:
    """Does nothing and returns False while a request holds blocks."""
    return reset(core.scheduler)


def settle(core: EngineCore) -> None:
    """If no request is left, wait until nobody copies its blocks any more; a few seconds at most. A program that holds the engine makes no steps
    between its requests, so nothing else would."""
    until = time.monotonic() + SETTLE_SECONDS
    while not core.scheduler.requests and core.has_unfinished_requests and time.monotonic() < until:
        core.step()


def reset(scheduler: Scheduler) -> bool:
    """As `reset_prefix_cache`, for a scheduler without an engine."""
    done = scheduler.kv_cache_manager.block_pool.reset()
    for hook in scheduler.hooks if done else ():
        if isinstance(hook, KeepsMore):
            hook.prefixes_forgotten()
    if trace.on:
        trace.emit("kv.reset", done=done)
    return done
