"""A KV connector: where blocks of keys and values go besides the cache, and where they come from (vLLM: KVConnectorBase_V1, and the same names). No torch.

It has two sides. The scheduler's says what is there, the worker's copies it. `connector.py` and `block_copies.py` stand between them and the walk: they say
which blocks are full and which tokens are missing, keep blocks in use while these are copied out, and record what a replay must know. A connector
says where blocks go, and knows neither the pool nor the trace. The contract:

- A block is found by its hash, which stands for all tokens up to its end; a connector that outlives the engine, or is shared, sees to the rest (weights, format).
- What the scheduler's side promises (`Match`) is at hand and whole, and stays so until the request is admitted or ends. So nothing can fail while a step
  runs: a block that is lost, torn or late is not promised, and its tokens are computed.
- It may take its time (a Future), and others overtake the request; after `max_read_seconds` it says what it has by then.
- Of the blocks that it is offered it takes those that it wants (`Transfers.saves`). They stay in use, and unchanged, until the worker's side names
  them in `get_finished`, also beyond the end of their request. vLLM delays the freeing of a request's blocks (`request_finished`); here it is block by block.
  Each must be named once for each time that it was taken, in any order, even if it could not be kept: a block that is never named is never free.
- One step's blocks are loaded before its model runs, and saved after it; steps run in the order in which they are decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stage03_engine.core.request import Request

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig
    from stage03_engine.core.model_runner import ModelRunner
    from stage03_engine.core.scheduler import Scheduler


class Match(NamedTuple):
    """Tokens of a request whose keys and values are at hand: so many from token `first` on, in whole blocks."""

    first: int
    num_tokens: int


NOTHING = Match(0, 0)


class FullBlock(NamedTuple):
    """A block that is full after the step."""

    request: Request
    block: int
    block_hash: bytes


class Transfers(msgspec.Struct, array_like=True):
    """What the scheduler's side tells the worker's of a step (vLLM: KVConnectorMetadata)."""

    loads: list[tuple[int, bytes | int]] = []  # (block, its bytes, or the place where the worker has them)
    saves: list[tuple[int, bytes, int]] = []  # (block, hash of its tokens, a place for it, or -1)
    withdrawn: list[int] = []  # places: nobody will ask for what was saved there
    told: list[int] = []  # places: the request has ended, and its client knows where its blocks are


class KVConnectorScheduler:
    """The scheduler's side. All methods are called in the engine's thread, and none waits."""

    offers_all = False
    """True: it is offered all blocks of a request, also those that the prefix cache had, and those that stay in use for it already."""

    def __init__(self, scheduler: Scheduler, config: VllmConfig) -> None:
        self.block_size = scheduler.kv_cache_manager.block_size

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, may_wait: bool
    ) -> Match | Future[None]:
        """Which tokens of a request can be loaded; of interest are those after the first `num_computed_tokens`, which are cached now, and before its
        last one. Asked when a request arrives, and when it is preempted.

        A Future: it is not known yet. Asked again, for the same, when that is done, or with `may_wait` False when the time is over; then a Future counts as nothing."""
        return NOTHING

    def update_state_after_alloc(self, request: Request, blocks: list[int], first: int) -> None:
        """The request is admitted, and these blocks are for what was promised, from token `first` on (none: it is not needed). The worker's
        side is to fill them in this step. The promise is kept."""

    def build_connector_meta(self, full: Sequence[FullBlock], room: int) -> Transfers:
        """The step is decided. `full` are blocks that were not offered before, `room` at most; `saves` names those to keep, and others that the connector wants, as long
        as there is room."""
        return Transfers()

    def update_connector_output(self, saved: list[int]) -> None:
        """The worker's side needs these blocks no longer (`get_finished`)."""

    def get_transfer_params(self, request: Request) -> dict[str, Any] | None:
        """A request has sampled its last token: what its client is told with it (vLLM: the second result of `request_finished`)."""
        return None

    def request_finished(self, request: Request) -> None:
        """It has ended, perhaps while it waited: nothing of it need be at hand. Its blocks are free but for those in `saves`."""

    def check_invariants(self, waiting: set[str]) -> None:
        """Raises AssertionError if something is kept for a request that does not wait, or is counted wrongly."""

    def shutdown(self) -> None:
        """The engine ends."""


class KVConnectorWorker:
    """The worker's side. All methods are called in the thread that runs the steps; `save_in_thread` gives work to another one."""

    def __init__(self, runner: ModelRunner, config: VllmConfig) -> None:
        self.runner = runner
        self._thread = ThreadPoolExecutor(1, "kv-writer")
        self._saving: dict[Future[None], list[int]] = {}  # -> blocks

    def register_kv_caches(self) -> None:
        """`runner.kv_caches` is allocated: at start, and again when an engine wakes from a sleep of level 2. What was saved before can still be asked for.
        Raises ConfigError if there is not enough memory for the connector's own."""

    def start_load_kv(self, loads: Sequence[tuple[int, bytes | int]]) -> None:
        """Bring these blocks into the cache, before the model runs."""

    def save_kv_blocks(self, saves: Sequence[tuple[int, bytes, int]]) -> None:
        """These blocks are full now, in all layers. (vLLM: save_kv_layer, for each layer as it is computed.)"""

    def withdraw(self, places: Sequence[int]) -> None:
        """Nobody will ask for what was saved in these places."""

    def told(self, places: Sequence[int]) -> None:
        """Somebody may ask for what was saved in these places from now on."""

    def save_in_thread(self, blocks: list[int], save: Callable[..., None], *args: object) -> None:
        """`save` reads these blocks in the thread, one call after another; what it raises ends the engine."""
        self._saving[self._thread.submit(save, *args)] = blocks

    def get_finished(self, wait_seconds: float) -> list[int]:
        """The blocks that need not stay in use any more. If there are none, it may wait so long for one: there is nothing else to do."""
        if self._saving and wait_seconds:
            wait(self._saving, wait_seconds, FIRST_COMPLETED)
        done = [saving for saving in self._saving if saving.done()]
        for saving in done:
            saving.result()  # raises what nobody expected
        return [block for saving in done for block in self._saving.pop(saving)]

    def shutdown(self) -> None:
        """Save what is left."""
        self._thread.shutdown()
