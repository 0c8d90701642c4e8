"""The scheduler's side of a folder of blocks (vLLM: SharedStorageConnector, today ExampleConnector). No torch.

Blocks outlive the engine, and several engines share them. What an adapter computed stays at home: two engines may call different adapters by the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import NOTHING, FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.reader import ReadAhead, folder_reader
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler


class SharedStorageConnectorScheduler(KVConnectorScheduler):
    """Finds blocks in the folder, and sends them along with the step."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        self._ahead = ReadAhead(config, folder_reader(config))
        self._loads: list[tuple[int, bytes | int]] = []  # of the step that is being decided

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """What the folder has after the cached prefix."""
        if request.hash_keys:  # keys and values depend on more than tokens, and the folder does not know on what
            return NOTHING
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        count = self._ahead.ask(request, first, request.block_hashes[first:last], may_wait)
        return count if isinstance(count, Future) else Match(num_computed_tokens, count * self.block_size)

    def update_state_after_alloc(self, request: Request, blocks: list[int], first: int) -> None:
        """The bytes travel with the step."""
        found = self._ahead.take(request.request_id, first // self.block_size, len(blocks))
        self._loads += zip(blocks, found, strict=True)

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """All that depends on tokens alone."""
        saves = [(block, block_hash, -1) for request, block, block_hash in full if not request.hash_keys]
        loads, self._loads = self._loads, []
        return Transfers(loads, saves)

    def request_finished(self, request: Request) -> None:
        """What was read for it is given up."""
        self._ahead.drop(request.request_id)

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError."""
        self._ahead.check_invariants(waiting)

    def shutdown(self) -> None:
        """End the thread, once it comes back from the disk."""
        self._ahead.shutdown()
