"""The scheduler's side of blocks that travel between engines (vLLM: NixlConnector). No torch.

A request for a producer says `do_remote_decode`: its full blocks stay in use after its end, and its last output says where they are. A request for a
consumer says that in turn, with `do_remote_prefill`: it waits until its blocks have come, and is admitted with what came.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from stage03_engine.config import VllmConfig
from stage03_engine.core.features.kv_transfer.base import NOTHING, FullBlock, KVConnectorScheduler, Match, Transfers
from stage03_engine.core.features.kv_transfer.reader import ReadAhead
from stage03_engine.core.features.p2p_connector.block_fetcher import BlockFetcher
from stage03_engine.core.features.p2p_connector.messages import params_of, source_of
from stage03_engine.core.request import Request
from stage03_engine.core.scheduler import Scheduler
from stage03_engine.errors import ConfigError

LISTENING: dict[str, int] = {}
"""Engine id -> the port on which the worker's side in this process listens."""


class P2pZmqConnectorScheduler(KVConnectorScheduler):
    """Says which blocks stay for others, and waits for those of others."""

    offers_all = True

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        super().__init__(scheduler, config)
        transfer = config.kv_transfer_config
        self._requests, self._transfer = scheduler.requests, transfer
        self._port: int = LISTENING.get(transfer.engine_id, transfer.kv_port)
        if transfer.saves and not self._port:
            raise ConfigError("kv_transfer_config: kv_port must be a port if the worker is a process of its own, not 0")
        self._kept: dict[str, int] = {}  # request -> the place of its blocks
        self._cut: set[str] = set()  # requests of which a block was not kept: those after it would not be found
        self._held: Counter[int | None] = Counter()  # API key -> blocks that it has kept
        self._keepers: dict[int, list[int | None]] = {}  # block -> for which keys
        self._told: set[str] = set()  # requests whose place was told to somebody who will ask
        self._withdrawn: list[int] = []
        self._ended: list[int] = []  # places of requests that have ended since the last step, and whose place was told
        self._asked: set[str] = set()  # requests whose blocks were asked for
        self._loads: list[tuple[int, bytes | int]] = []  # of the step that is being decided
        self._fetcher = self.make_fetcher(config) if transfer.loads else None
        self._ahead = None if self._fetcher is None else ReadAhead(config, self._fetcher)

    @staticmethod
    def make_fetcher(config: VllmConfig) -> BlockFetcher:
        """The consumer's end of the links."""
        return BlockFetcher(config)

    # A consumer

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """What has come from the producer. It is asked once: after a preemption it has nothing left."""
        source, request_id = source_of(request), request.request_id
        if source is None or self._ahead is None or self._fetcher is None:
            return NOTHING
        if request_id in self._asked and not self._ahead.knows(request_id):
            return NOTHING
        self._asked.add(request_id)
        first, last = num_computed_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        count = self._ahead.ask(request, first, request.block_hashes[first:last], may_wait)
        if isinstance(count, Future):
            return count
        if not self._ahead.knows(request_id):  # all of it is cached here, or there is no room for more
            self._fetcher.tell_done(source)
        return Match(num_computed_tokens, count * self.block_size)

    def update_state_after_alloc(self, request: Request, blocks: list[int], first: int) -> None:
        """The bytes travel with the step."""
        if self._ahead is not None:
            found = self._ahead.take(request.request_id, first // self.block_size, len(blocks))
            self._loads += zip(blocks, found, strict=True)

    # A producer

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """Those of requests that another engine goes on with."""
        saves: list[tuple[int, bytes, int]] = []
        for request, block, block_hash in full:
            if params_of(request).get("do_remote_decode") and self._may_keep(request, room - len(saves)):
                saves.append((block, block_hash, self._place(request.request_id)))
                self._held[request.tenant] += 1
                self._keepers.setdefault(block, []).append(request.tenant)
        transfers = Transfers(self._loads, saves, self._withdrawn, self._ended)
        self._loads, self._withdrawn, self._ended = [], [], []
        return transfers

    def _may_keep(self, request: Request, room: int) -> bool:
        """Of several API keys none holds more than it leaves for the others: however many never ask for their blocks, there is room for
        one more."""
        if request.tenant is not None and self._held[request.tenant] >= room:
            self._cut.add(request.request_id)
        return request.request_id not in self._cut

    def update_connector_output(self, saved: list[int]) -> None:
        """If several keys have kept a block (--shared-prefix-cache), the order does not matter: each is counted down once."""
        for block in saved:
            keepers = self._keepers[block]
            self._held[keepers.pop()] -= 1
            if not keepers:
                del self._keepers[block]

    def _place(self, request_id: str) -> int:
        """Random: nobody can give back blocks whose place they were not told."""
        if request_id not in self._kept:
            self._kept[request_id] = secrets.randbits(63)
        return self._kept[request_id]

    def get_transfer_params(self, request: Request) -> dict[str, Any] | None:
        """Where its blocks are kept, for the engine that goes on with it."""
        if (place := self._kept.get(request.request_id)) is None:
            return None
        self._told.add(request.request_id)
        transfer = self._transfer
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": transfer.engine_id,
            "remote_host": transfer.kv_ip, "remote_port": self._port, "remote_request_id": place,
        }  # fmt: skip

    def withdraw(self, places: Sequence[int]) -> None:
        """Whoever was told of these will not ask."""
        self._withdrawn += places

    # Both

    def request_finished(self, request: Request) -> None:
        """Nobody will ask for the blocks of one that was aborted. What is on its way is given up, and the producer is told."""
        request_id = request.request_id
        place = self._kept.pop(request_id, None)
        if place is not None:
            (self._ended if request_id in self._told else self._withdrawn).append(place)
        self._told.discard(request_id)
        self._cut.discard(request_id)
        if self._ahead is not None:
            self._ahead.drop(request_id)
        self._asked.discard(request_id)

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError."""
        known = self._requests.keys()
        assert self._kept.keys() | self._told | self._asked | self._cut <= known, (
            "something is kept for a request that has ended"
        )
        assert sum(self._held.values()) == sum(map(len, self._keepers.values())), "blocks are counted wrongly"
        if self._ahead is not None:
            self._ahead.check_invariants(waiting)

    def shutdown(self) -> None:
        """End the thread."""
        if self._ahead is not None:
            self._ahead.shutdown()
