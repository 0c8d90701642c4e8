"""Between the scheduler and a KV connector: who asks it, who waits for it, and which blocks stay in use for it (vLLM does this in its Scheduler). No torch.

A new request waits until the connector knows which blocks after those in the prefix cache it has, for `max_read_seconds` at most; so does one that was
preempted. It is admitted with what is at hand by then, so what the scheduler counts on cannot get lost any more. Full blocks are copied from where they are, in the KV cache:
until the worker says that a block is saved, it stays in use, even if its request has ended.

A decision depends on what was found, and on which blocks were saved by then. Both are events of the trace, so a replay decides the same without a
connector (recorded_transfers.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import NOTHING, FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.connectors import make_connector
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput
from stagetrace import trace

WAIT_SECONDS = 0.02  # a request that arrives during it waits at most this long


class Written(msgspec.Struct, array_like=True):
    """Blocks that the worker needs no longer."""

    blocks: list[int]


TRANSFERS, WRITTEN = Extra("kv_transfer", Transfers), Extra("kv_transfer", Written)


class Asked(NamedTuple):
    """A request waits for an answer."""

    answer: Future[None]
    num_computed: int  # tokens that were cached then
    until: float  # on the clock of `monotonic`


class KVConnectorHook(SchedulerHook):
    """Installed with `--kv-transfer-config`, and with `--kv-offloading-size`."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self._manager, self._limits = scheduler.kv_cache_manager, config.kv_transfer_config
        self._most_held = max(1, self._manager.block_pool.num_usable // 4)
        self._most_seconds = self._limits.max_read_seconds
        self.held_blocks: Counter[int] = Counter()  # they are being saved -> how often each was taken
        self._asked: dict[str, Asked] = {}
        self._found: dict[str, Match] = {}  # of requests that were not admitted yet
        self._released: dict[str, None] = {}
        self._num_saved: dict[str, int] = {}  # request -> of its blocks, those that were dealt with
        self.connector = self._connect()

    def _connect(self) -> KVConnectorScheduler:
        return make_connector(self._limits.scheduler_side, KVConnectorScheduler, self.scheduler, self.config)

    # What a request finds

    def added(self, request: Request) -> None:
        """Ask for what follows its prefix in the cache."""
        if self._may_ask(request):
            num_computed = len(self._manager.get_computed_blocks(request)) * self._manager.block_size
            self._ask(request, num_computed, monotonic() + self._most_seconds)

    def _may_ask(self, request: Request) -> bool:
        return self._limits.loads and not request.skip_reading_prefix_cache

    def _ask(self, request: Request, num_computed: int, until: float) -> None:
        """For the first time, or again: then it has waited."""
        request_id, may_wait = request.request_id, monotonic() < until
        waited = self._asked.pop(request_id, None) is not None
        found = self.connector.get_num_new_matched_tokens(request, num_computed, may_wait)
        if isinstance(found, Future):
            if may_wait:
                self._asked[request_id] = Asked(found, num_computed, until)
                return
            found = NOTHING
        if waited or found.num_tokens:
            self._found[request_id], self._released[request_id] = found, None

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That it waits for the connector."""
        return {"kv_transfer": True} if self.holds(request) else {}

    def holds(self, request: Request) -> bool:
        """Until the connector knows, and `released` says so."""
        return request.request_id in self._asked or request.request_id in self._released

    def poll(self) -> tuple[list[EngineCoreOutput], bool | None]:
        """Take what was found. If all others wait too, wait a moment."""
        self._take_answers()
        num_held = len(self.scheduler.held)
        if self._asked and num_held == len(self.scheduler.requests) and not self._released:
            wait([asked.answer for asked in self._asked.values()], WAIT_SECONDS, FIRST_COMPLETED)
            self._take_answers()
            return [], bool(self._released)
        return [], True if self._released else None

    def _take_answers(self) -> None:
        now = monotonic()
        for request_id, (answer, num_computed, until) in list(self._asked.items()):
            if answer.done():
                answer.result()  # raises what nobody expected
            if answer.done() or now >= until:
                self._ask(self.scheduler.requests[request_id], num_computed, until)

    def released(self) -> Iterable[str]:
        """Those who know what there is."""
        released, self._released = self._released, {}
        for request_id in released:
            first, num_tokens = self._found[request_id]
            if trace.on:
                size = self._manager.block_size
                trace.emit(
                    "kv_transfer.found", req=request_id, step=self.scheduler.step, first=first // size, num_blocks=num_tokens // size,
                )  # fmt: skip
        return released

    def num_matched(self, request: Request, num_computed: int) -> int:
        """The tokens that were promised, if they follow what is known. None for a request that needs more of its prompt than keys and values."""
        first, num_tokens = self._found.get(request.request_id, NOTHING)
        if request.skip_reading_prefix_cache or num_computed % self._manager.block_size or num_computed < first:
            # cached blocks that came before were evicted meanwhile
            return 0
        return max(0, first + num_tokens - num_computed)

    def admitted(
        self, request: Request, output: SchedulerOutput, new_blocks: list[int], first: int, num_matched: int
    ) -> None:
        """The worker copies them into the cache. What was cached meanwhile is not needed."""
        size, end = self._manager.block_size, first + num_matched
        self.connector.update_state_after_alloc(request, new_blocks[first // size : end // size], first)
        self._num_saved[request.request_id] = 0 if self.connector.offers_all else end // size
        self._forget(request.request_id)
        if self._limits.loads and request.status != RequestStatus.PREEMPTED:  # like those of the prefix cache
            queries = request.num_tokens - first
            self.scheduler.stats.count(external_prefix_cache_queries=queries, external_prefix_cache_hits=num_matched)

    def preempted(self, request: Request, output: SchedulerOutput) -> bool:
        """Some of its blocks may be gone when it is resumed: ask for them."""
        self.added(request)
        if trace.on and self.holds(request):
            trace.emit("kv_transfer.asked", req=request.request_id, step=output.step)
        return False

    def _forget(self, request_id: str) -> None:
        """What it found is not needed any more."""
        for known in (self._found, self._asked, self._released):
            known.pop(request_id, None)

    # What is saved

    def decided(self, output: SchedulerOutput) -> None:
        """Offer the blocks that are full. Those that the connector takes stay in use; as long as too many do, it gets no more."""
        room, full = self._most_held - self.held_blocks.total(), list[FullBlock]()
        for request_id in output.num_scheduled_tokens:
            full += self._filled(request_id, room - len(full))
        transfers = self.connector.build_connector_meta(full, room)
        if any(msgspec.structs.astuple(transfers)):
            TRANSFERS.put(output.extras, transfers)
        if transfers.saves:
            blocks = [block for block, *_ in transfers.saves]
            self._manager.block_pool.touch(blocks)
            self.held_blocks.update(blocks)
            if trace.on:
                trace.emit("kv_transfer.writing", step=output.step, blocks=blocks)

    def _filled(self, request_id: str, room: int) -> list[FullBlock]:
        """A request's blocks that are full now, and were not offered before, in order: without the first ones the others are not found. For which there is no
        room, those come with a later step."""
        first, end = self._num_saved[request_id], self._manager.num_cached.get(request_id, 0)
        if end <= first or room <= 0 or not self._limits.saves:
            return []
        end = self._num_saved[request_id] = min(end, first + room)
        table, request = self._manager.block_table(request_id), self.scheduler.requests[request_id]
        new = [i for i in range(first, end) if self.connector.offers_all or table[i] not in self.held_blocks]
        return [FullBlock(request, table[i], request.block_hashes[i]) for i in new]

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Blocks that are saved need not stay."""
        written = WRITTEN.of(runner_output.extras)
        if written is not None:
            self._let_go(written.blocks, output.step)
        return []

    def _let_go(self, blocks: list[int], step: int) -> None:
        self.held_blocks -= Counter(blocks)
        self._manager.block_pool.free(blocks)
        self.connector.update_connector_output(blocks)
        if trace.on:
            trace.emit("kv_transfer.written", step=step, blocks=blocks)

    def sampled(
        self, request: Request, new: EngineCoreOutput, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> str | None:
        """With the last token goes what another engine must know to find the blocks."""
        if new.finish_reason is not None and (params := self.connector.get_transfer_params(request)):
            new.result = (new.result or {}) | {"kv_transfer_params": params}
        return None

    def finished(self, request: Request) -> None:
        """What it found is not needed; what it filled is saved all the same."""
        self._forget(request.request_id)
        self.connector.request_finished(request)
        self._num_saved.pop(request.request_id, None)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        waiting = {request.request_id for request in self.scheduler.waiting} | self.scheduler.held.keys()
        assert self._found.keys() | self._asked.keys() <= waiting, "blocks are at hand for a request that does not wait"
        assert self._released.keys() <= self._found.keys()
        self.connector.check_invariants(waiting)

    def shutdown(self) -> None:
        """The connector ends."""
        self.connector.shutdown()
