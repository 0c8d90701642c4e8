"""`--check-invariants`: what must hold of the scheduler's whole state after each step. Every test asks for it too. No torch.

vLLM has no counterpart.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from stage03_engine.core.block_pool import NULL_BLOCK, BlockPool
from stage03_engine.core.hooks import RunnerHook, SchedulerHook
from stage03_engine.core.kv_cache_manager import KVCacheManager
from stage03_engine.core.sched_output import SchedulerOutput
from stage03_engine.core.scheduler import Scheduler

if TYPE_CHECKING:
    from stage03_engine.core.input_batch import StepInputs


class CheckInvariantsHook(SchedulerHook):
    """Installed with `--check-invariants`."""

    def updated(self, output: SchedulerOutput) -> None:
        """Raises AssertionError."""
        check_invariants(self.scheduler)


class CheckSlotsHook(RunnerHook):
    """Installed with `--check-invariants`."""

    def prepared(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Raises AssertionError."""
        slots = inputs.metadata.slot_mapping
        assert len(slots.unique()) == len(inputs.positions), "a slot is written twice in one step"


def check_invariants(scheduler: Scheduler) -> None:
    """Raises AssertionError if the state contradicts itself."""
    check_blocks(scheduler.kv_cache_manager, {block for hook in scheduler.hooks for block in hook.held_blocks})
    check_queues_and_slots(scheduler)
    for hook in scheduler.hooks:
        hook.check_invariants()


def check_pool(pool: BlockPool) -> None:
    """Raises AssertionError if free + used is not all, or the hashes contradict themselves."""
    free, used = list(pool._free), [block.block_id for block in pool._blocks[1:] if block.ref_cnt > 0]
    assert sorted(free + used) == list(range(1, pool.num_usable + 1)), "a block is lost, or free and used"
    assert pool._blocks[NULL_BLOCK].ref_cnt == 0 and pool._blocks[NULL_BLOCK].block_hash is None
    hashed = {block.block_hash: block for block in pool._blocks if block.block_hash is not None}
    assert hashed == pool._by_hash, "the hash table and the blocks disagree"


def check_blocks(manager: KVCacheManager, held: Collection[int] = ()) -> None:
    """Raises AssertionError if blocks are lost, or shared without being the same prefix. Hooks may hold blocks beyond their request's end."""
    pool = manager.block_pool
    check_pool(pool)
    owners: dict[int, list[tuple[int, str]]] = {}
    for request_id, table in manager.tables.items():
        for place, block in enumerate(table):
            owners.setdefault(block, []).append((place, request_id))
    assert len(owners.keys() | set(held)) == pool.num_usable - pool.num_free, "tables and pool disagree"
    for block, places in owners.items():
        assert len({place for place, _ in places}) == 1, f"block {block} is shared at different places: {places}"
        shared_by_hash = all(place < manager.num_cached.get(owner, 0) for place, owner in places)
        assert len(places) == 1 or shared_by_hash, f"block {block} is shared without a hash: {places}"


def check_queues_and_slots(scheduler: Scheduler) -> None:
    """Every request is in one queue, once, and every computed token has a slot. Raises AssertionError."""
    running, waiting = {r.request_id for r in scheduler.running}, {r.request_id for r in scheduler.waiting}
    assert len(running) == len(scheduler.running), "a request is queued twice"
    assert len(waiting) == len(scheduler.waiting), "a request is queued twice"
    apart = set(scheduler.held)
    assert len(running | waiting | apart) == len(running) + len(waiting) + len(apart), "a request both runs and waits"
    assert running | waiting | apart == set(scheduler.requests), "a request is lost"
    manager = scheduler.kv_cache_manager
    for request in scheduler.running:
        held = len(manager.block_table(request.request_id)) * manager.block_size
        assert request.num_computed_tokens <= held, "a token has no slot"
