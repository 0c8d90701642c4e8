"""The scheduler's side of the folder: which blocks a request finds there, which ones are written (vLLM: KVConnectorBase_V1, SharedStorageConnector).
No torch.

A new request waits while a thread reads the blocks that follow those in the prefix cache, for `max_read_seconds` at most. It is admitted with what was
read and checked by then, so what the scheduler counts on cannot get lost any more. Full blocks are written from where they are, in the KV cache: until the worker says that a block is
written, it stays in use, even if its request has ended.

A decision depends on what was found, and on which blocks were written by then. Both are events of the trace, so a replay decides the same without a
folder (recorded_transfers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic
from typing import Any

import msgspec

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.block_store import BlockStore
from stage03_engine.core.features.kv_transfer.reader import BlockReader, Found
from stage03_engine.core.features.turns.turns import Asker
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.kv_cache_size import kv_block_bytes
from stage03_engine.core.request import Request, RequestStatus
from stage03_engine.core.sched_output import Extra, ModelRunnerOutput, SchedulerOutput
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.messages import EngineCoreOutput
from stagetrace import trace
from stagetrace.ids import root_of

WAIT_SECONDS = 0.02  # a request that arrives during it waits at most this long


class Transfers(msgspec.Struct, array_like=True):
    """What the worker copies in a step: into these blocks before the model runs, out of those after it."""

    loads: list[tuple[int, bytes]] = []
    saves: list[tuple[int, bytes]] = []  # (block, hash of its tokens)


class Written(msgspec.Struct, array_like=True):
    """Blocks that the worker needs no longer."""

    blocks: list[int]


TRANSFERS, WRITTEN = Extra("kv_transfer", Transfers), Extra("kv_transfer", Written)


class KVConnectorHook(SchedulerHook):
    """Installed with `--kv-transfer-config`."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self._manager, self._limits = scheduler.kv_cache_manager, config.kv_transfer_config
        self._most_held = max(1, self._manager.block_pool.num_usable // 4)
        self.held_blocks: set[int] = set()  # they are being written
        self._reading: dict[str, Future[None]] = {}
        self._found: dict[str, Found] = {}  # of requests that were not admitted yet
        self._num_bytes = 0  # in _found, and what is being read may become
        self._released: dict[str, None] = {}
        self._num_saved: dict[str, int] = {}  # request -> of its blocks, those that were dealt with
        self._transfers = Transfers()  # of the step that is being decided
        self._open(config)

    def _open(self, config: VllmConfig) -> None:
        self._block_bytes = kv_block_bytes(config)
        self._reader = BlockReader(BlockStore.of(config))

    # What a request finds

    def added(self, request: Request) -> None:
        """Begin to read what follows its prefix in the cache."""
        first, wanted = self._wanted(request)
        if wanted:
            found = Found(first, len(wanted) * self._block_bytes, late_at=monotonic() + self._limits.max_read_seconds)
            self._found[request.request_id], self._num_bytes = found, self._num_bytes + found.num_bytes
            asker = Asker(request.tenant, root_of(request.request_id))
            self._reading[request.request_id] = self._reader.read(asker, found, wanted)

    def _wanted(self, request: Request) -> tuple[int, list[bytes]]:
        """(number of the first block that is not cached, hashes of it and those after it, as many as there is memory for). Whether they are
        there is for the thread to see: a slow disk must not hold up the steps.

        None for a request whose keys and values depend on more than its tokens (`hash_keys`): the folder does not know on what."""
        if not self._limits.loads or request.hash_keys or request.skip_reading_prefix_cache:
            return 0, []
        first = len(self._manager.get_computed_blocks(request))
        room = (self._limits.buffer_bytes - self._num_bytes) // self._block_bytes
        last = (request.num_tokens - 1) // self._manager.block_size
        return first, request.block_hashes[first : min(last, first + max(0, room))]

    def traced_params(self, request: Request) -> dict[str, Any]:
        """That it waits for the folder."""
        return {"kv_transfer": True} if request.request_id in self._reading else {}

    def holds(self, request: Request) -> bool:
        """Until its blocks are read, and `released` says so."""
        return request.request_id in self._reading or request.request_id in self._released

    def poll(self) -> tuple[list[EngineCoreOutput], bool | None]:
        """Take what was read. If all others wait for theirs, wait a moment."""
        self._take_read()
        num_held = len(self.scheduler.held)
        if self._reading and num_held == len(self.scheduler.requests) and not self._released:
            wait(self._reading.values(), WAIT_SECONDS, FIRST_COMPLETED)
            self._take_read()
            return [], bool(self._released)
        return [], True if self._released else None

    def _take_read(self) -> None:
        now = monotonic()
        for request_id, reading in list(self._reading.items()):
            found = self._found[request_id]
            if reading.done() or now >= found.late_at:
                self._end(found, self._reading.pop(request_id))
                self._num_bytes += sum(map(len, found.blocks)) - found.num_bytes
                found.num_bytes = sum(map(len, found.blocks))
                self._released[request_id] = None

    def _end(self, found: Found, reading: Future[None]) -> None:
        self._reader.end(found)
        if reading.done():
            reading.result()  # raises what nobody expected

    def released(self) -> Iterable[str]:
        """Those whose blocks were read."""
        released, self._released = self._released, {}
        for request_id in released:
            found = self._found[request_id]
            if trace.on:
                trace.emit(
                    "kv_transfer.found",
                    req=request_id,
                    step=self.scheduler.step,
                    first=found.first,
                    num_blocks=len(found.blocks),
                )
        return released

    def num_matched(self, request: Request, num_computed: int) -> int:
        """The tokens in the blocks that were read, if they follow what is known. None for a request that needs more of its prompt than keys
        and values."""
        found, (number, rest) = self._found.get(request.request_id), divmod(num_computed, self._manager.block_size)
        if found is None or request.skip_reading_prefix_cache or rest or number < found.first:
            # cached blocks that came before were evicted meanwhile
            return 0
        return max(0, found.first + len(found.blocks) - number) * self._manager.block_size

    def admitted(
        self, request: Request, output: SchedulerOutput, new_blocks: list[int], first: int, num_matched: int
    ) -> None:
        """The worker copies them into the cache. What was cached meanwhile is not needed."""
        size, request_id = self._manager.block_size, request.request_id
        number, count = first // size, num_matched // size
        if count:
            found = self._found[request_id]
            blocks = found.blocks[number - found.first :][:count]
            self._transfers.loads += zip(new_blocks[number : number + count], blocks, strict=True)
        self._num_saved[request_id] = (first + num_matched) // size
        self._forget(request_id)
        if self._limits.loads and request.status != RequestStatus.PREEMPTED:  # like those of the prefix cache
            queries = request.num_tokens - first
            self.scheduler.stats.count(external_prefix_cache_queries=queries, external_prefix_cache_hits=num_matched)

    def _forget(self, request_id: str) -> None:
        """Give up what a request found, or may find."""
        found, reading = self._found.pop(request_id, None), self._reading.pop(request_id, None)
        if found is not None:
            self._num_bytes -= found.num_bytes
            if reading is not None:
                self._end(found, reading)

    # What is written

    def decided(self, output: SchedulerOutput) -> None:
        """Write the blocks that this step fills, as long as not too many wait to be written."""
        for request_id in output.num_scheduled_tokens:
            first, end = self._num_saved[request_id], self._manager.num_cached.get(request_id, 0)
            if end > first:
                self._num_saved[request_id] = end
                self._save(self.scheduler.requests[request_id], first, end)
        if self._transfers.loads or self._transfers.saves:
            TRANSFERS.put(output.extras, self._transfers)
            if trace.on and self._transfers.saves:
                trace.emit(
                    "kv_transfer.writing", step=output.step, blocks=[block for block, _ in self._transfers.saves]
                )
            self._transfers = Transfers()

    def _save(self, request: Request, first: int, end: int) -> None:
        table = self._manager.block_table(request.request_id)
        new = [(table[i], request.block_hashes[i]) for i in range(first, end) if table[i] not in self.held_blocks]
        if self._limits.saves and not request.hash_keys:
            # the first ones: without them the others are not found
            new = new[: self._most_held - len(self.held_blocks)]
            self._hold([block for block, _ in new])
            self._transfers.saves += new

    def _hold(self, blocks: list[int]) -> None:
        self._manager.block_pool.touch(blocks)
        self.held_blocks.update(blocks)

    def executed(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Blocks that are written need not stay."""
        written = WRITTEN.of(runner_output.extras)
        if written is not None:
            self._let_go(written.blocks, output.step)
        return []

    def _let_go(self, blocks: list[int], step: int) -> None:
        self.held_blocks.difference_update(blocks)
        self._manager.block_pool.free(blocks)
        if trace.on:
            trace.emit("kv_transfer.written", step=step, blocks=blocks)

    def finished(self, request: Request) -> None:
        """What it found is not needed; what it filled is written all the same."""
        self._forget(request.request_id)
        self._released.pop(request.request_id, None)
        self._num_saved.pop(request.request_id, None)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        waiting = {request.request_id for request in self.scheduler.waiting} | self.scheduler.held.keys()
        assert self._found.keys() <= waiting, "blocks were read for a request that does not wait"
        assert self._reading.keys() <= self._found.keys()
        assert self._num_bytes == sum(found.num_bytes for found in self._found.values()), "bytes are lost"

    def shutdown(self) -> None:
        """End the thread, once it comes back from the disk."""
        self._reader.shutdown()
