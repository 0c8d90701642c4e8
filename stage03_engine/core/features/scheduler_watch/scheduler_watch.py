"""The scheduler's trace events for the live view of the server's page.

None of this runs while nobody watches. vLLM has no counterpart.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from stage03_engine.core.block_pool import BlockPool
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.messages import EngineCoreOutputs
from stagetrace import Event, trace
from stagetrace.event import encode

if TYPE_CHECKING:
    from stage03_engine.core.engine_core import EngineCore
    from stage03_engine.core.scheduler import Scheduler

SHOWN: dict[str, tuple[str, ...]] = {
    "sched.state": ("requests", "running", "waiting", "free_blocks", "cached", "settings"),
    "sched.queued": ("num_prompt_tokens",),
    "sched.admit": ("num_prompt_tokens",),
    "sched.resume": ("num_tokens",),
    "sched.prefix_hit": ("blocks", "num_tokens"),
    "sched.scheduled": ("num_tokens", "num_computed", "missing"),
    "sched.held_back": ("rule", "first"),
    "sched.preempt": ("num_computed", "swapped", "needed_by"),
    "sched.token": ("num_tokens", "num_output_tokens"),
    "sched.finished": ("reason", "by"),
    "sched.output": ("total_tokens", "budget", "free_blocks"),
    "kv.allocated": ("blocks",),
    "kv.freed": ("blocks",),
    "kv.cached": ("blocks",),
    "kv.evicted": ("block",),
    "kv.reset": ("done",),
    "spec.verified": ("accepted", "drafted"),
}
"""Event -> those of its arguments that a watcher sees: counts, ids and blocks, never tokens or text, whatever the trace
itself may hold."""

MAX_EVENTS = 16_384  # kept between two steps; beyond that a watcher gets the state anew
MAX_REQUESTS = 256  # described in one state; the others appear when something happens to them


class SchedulerWatch:
    """Collects the events of one scheduler between two steps, while there is a watcher."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lines: list[bytes] = []
        self._seq = itertools.count(1)

    def start(self) -> bool:
        """Start to watch. Called again, it sends the state again, for a new watcher."""
        trace.watch(self._see, SHOWN)
        self._tell_state()
        return True

    def stop(self) -> bool:
        """Stop watching."""
        trace.watch(None)
        self._lines = []
        return True

    def take(self) -> list[bytes]:
        """The events since the last call, as lines of JSON."""
        if len(self._lines) >= MAX_EVENTS:  # some are missing
            self._lines = []
            self._tell_state()
        lines, self._lines = self._lines, []
        return lines

    def __call__(self, outputs: EngineCoreOutputs) -> None:
        """The outputs of a step carry the events since the last step."""
        outputs.trace_events = self.take()

    def _see(self, event: Event) -> None:
        if len(self._lines) < MAX_EVENTS:
            shown = {name: event.args[name] for name in SHOWN[event.name]}
            head = (event.v, next(self._seq), event.ts, event.pid, event.proc, event.ph, event.name, event.phase)
            self._lines.append(encode(Event(*head, event.src, event.req, event.step, args=shown)))

    def _tell_state(self) -> None:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        requests = [*scheduler.running, *scheduler.waiting, *scheduler.held.values()][:MAX_REQUESTS]
        settings = {
            "num_blocks": pool.num_usable,
            "block_size": scheduler.kv_cache_manager.block_size,
            "max_num_batched_tokens": scheduler.config.max_num_batched_tokens,
            "max_num_seqs": scheduler.config.max_num_seqs,
        }
        if trace.on:
            trace.emit(
                "sched.state", step=scheduler.step, requests=[self._describe(request) for request in requests],
                running=len(scheduler.running), waiting=scheduler.num_waiting, free_blocks=pool.num_free,
                cached=cached_blocks(pool), settings=settings,
            )  # fmt: skip

    def _describe(self, request: Request) -> dict[str, Any]:
        runs = request.status == RequestStatus.RUNNING
        return {
            "req": request.request_id,
            "status": request.status.name.lower(),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_tokens": request.num_tokens,
            "num_computed": request.num_computed_tokens,
            "blocks": self._scheduler.kv_cache_manager.block_table(request.request_id) if runs else [],
        }


def cached_blocks(pool: BlockPool) -> list[int]:
    """The blocks, free or in use, whose tokens can be found by their hash. A user's own pool may not know."""
    return [block.block_id for block in getattr(pool, "_by_hash", {}).values()]


def _watch(core: EngineCore) -> SchedulerWatch | None:
    return next((observer for observer in core.observers if isinstance(observer, SchedulerWatch)), None)


def watch_scheduler(core: EngineCore) -> bool:
    """From now on the outputs of each step carry the scheduler's events, the state as it is now first."""
    watch = _watch(core)
    if watch is None:
        watch = SchedulerWatch(core.scheduler)
        core.observers.append(watch)
    return watch.start()


def unwatch_scheduler(core: EngineCore) -> bool:
    """The last watcher has left."""
    watch = _watch(core)
    if watch is not None:
        core.observers.remove(watch)
        watch.stop()
    return True
