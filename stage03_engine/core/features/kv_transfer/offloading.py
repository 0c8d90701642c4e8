"""The scheduler's side of offloading: full blocks are copied to CPU memory, where they are found when the prefix cache has lost them (vLLM: OffloadingConnector, of
`--kv-offloading-size`). With a folder that is a second tier. No torch.

Blocks that an adapter changed are found in memory, as in the prefix cache; the folder does not get them (shared_storage.py).

`--preemption-mode swap` has a memory of its own: what it keeps is a request's, down to the last block that is not full, which no hash names.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import psutil

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.block_parts import part_bytes
from stage03_engine.core.features.kv_transfer.cpu_blocks import CPUBlocks
from stage03_engine.core.features.kv_transfer.reader import ReadAhead, folder_reader
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError


def num_cpu_blocks(config: VllmConfig) -> int:
    """How many blocks there is room for in the memories of all workers together. Raises ConfigError if that is none, or if the machine has less memory."""
    size, block_bytes = config.kv_transfer_config.cpu_bytes, sum(part_bytes(config))
    if size > psutil.virtual_memory().total:
        raise ConfigError(
            f"there is not enough memory for {size} bytes of offloaded KV-cache blocks; lower --kv-offloading-size (cpu_bytes_to_use)"
        )
    if size < block_bytes:
        raise ConfigError(
            f"{size} bytes of memory have no room for one KV-cache block of {block_bytes} bytes; raise --kv-offloading-size (cpu_bytes_to_use)"
        )
    return size // block_bytes


class Promise(NamedTuple):
    """Blocks of a request that are in memory, from its block number `first` on."""

    first: int
    hashes: list[bytes]
    places: list[int]


class OffloadingConnectorScheduler(KVConnectorScheduler):
    """Says which block is where."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self.memory = CPUBlocks(num_cpu_blocks(config))
        self._ahead = ReadAhead(config, folder_reader(config)) if config.kv_transfer_config.path is not None else None
        self._promised: dict[str, Promise] = {}
        self._loads: list[tuple[int, bytes | int]] = []  # of the step that is being decided
        self._from_folder: list[FullBlock] = []  # of it, those that memory gets too
        self._saving: dict[int, bytes] = {}  # block -> its hash

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """What is in memory, and after it what is in the folder."""
        promise = self._promised.get(request.request_id) or self._promise(request, num_computed_tokens)
        end, last = promise.first + len(promise.hashes), (request.num_tokens - 1) // self.block_size
        count: Future[None] | int = 0
        if self._ahead is not None and not request.hash_keys:
            count = self._ahead.ask(request, end, request.block_hashes[end:last], may_wait)
        if isinstance(count, Future):
            return count
        return Match(promise.first * self.block_size, (end - promise.first + count) * self.block_size)

    def _promise(self, request: Request, num_computed_tokens: int) -> Promise:
        """If memory has all of the cached prefix too, it is promised: the cache may lose it before the request is admitted."""
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        self.memory.touch(hashes)
        cached = num_computed_tokens // self.block_size
        first = 0 if self.memory.lookup(hashes) >= cached else cached
        found = hashes[first : first + self.memory.lookup(hashes[first:])]
        promise = self._promised[request.request_id] = Promise(first, found, self.memory.prepare_load(found))
        return promise

    def update_state_after_alloc(self, request: Request, blocks: list[int], first: int) -> None:
        """Blocks in memory are named by their place; bytes from the folder travel with the step."""
        number = first // self.block_size
        promise = self._drop(request.request_id)
        places = promise.places[number - promise.first :][: len(blocks)] if promise and blocks else []
        self._loads += zip(blocks, places)
        if self._ahead is not None:
            number, rest = number + len(places), blocks[len(places) :]
            self._loads += zip(rest, self._ahead.take(request.request_id, number, len(rest)), strict=True)
            hashes = request.block_hashes[number : number + len(rest)]
            self._from_folder += [FullBlock(request, *each) for each in zip(rest, hashes, strict=True)]

    def _drop(self, request_id: str) -> Promise | None:
        promise = self._promised.pop(request_id, None)
        if promise is not None:
            self.memory.complete_load(promise.hashes)
        return promise

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """Those that memory lacks, as long as it has places for them."""
        transfers = Transfers(self._loads, [])
        for number, (request, block, block_hash) in enumerate((*full, *self._from_folder)):
            if len(transfers.saves) == room:
                break
            if (place := self.memory.prepare_store(block_hash)) is None:
                continue
            self._saving[block] = block_hash
            stays = self._ahead is None or request.hash_keys or number >= len(full)
            transfers.saves.append((block, b"" if stays else block_hash, place))
        self._loads, self._from_folder = [], []
        return transfers

    def update_connector_output(self, saved: list[int]) -> None:
        """They can be loaded from now on."""
        for block in reversed(saved):
            self.memory.complete_store(self._saving.pop(block))

    def request_finished(self, request: Request) -> None:
        """Its blocks were of use until now."""
        self._drop(request.request_id)
        self.memory.touch(request.block_hashes)
        if self._ahead is not None:
            self._ahead.drop(request.request_id)

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError."""
        self.memory.check_invariants()
        assert self._promised.keys() <= waiting, "blocks keep their places for a request that does not wait"
        if self._ahead is not None:
            self._ahead.check_invariants(waiting)

    def shutdown(self) -> None:
        """End the thread that reads, once it comes back from the disk."""
        if self._ahead is not None:
            self._ahead.shutdown()
