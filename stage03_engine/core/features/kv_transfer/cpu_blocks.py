"""Which blocks are in CPU memory, and where: the least recently used ones make room (vLLM: LRUOffloadingManager, and the same names). No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class CPUBlocks:
    """Places for so many blocks, found by the hash of their tokens.

    A block is being stored, or can be loaded; while somebody is going to load it, it keeps its place. Invariant: a place is free, or has one block.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places, self._unused = num_places, num_places
        self._free: list[int] = []  # used before; the others have never been, and take no memory yet
        self._place: dict[bytes, int] = {}
        self._storing: set[bytes] = set()
        self._loading: dict[bytes, int] = {}  # -> by how many requests
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # neither: the next to go comes first

    def lookup(self, hashes: Iterable[bytes]) -> int:
        """How many of these, from the first on, can be loaded."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._place or block_hash in self._storing:
                break
            count += 1
        return count

    def touch(self, hashes: Sequence[bytes]) -> None:
        """They were of use: the first one goes last, because without it the others are not found."""
        for block_hash in reversed(hashes):
            if block_hash in self._idle:
                self._idle.move_to_end(block_hash)

    def prepare_load(self, hashes: Sequence[bytes]) -> list[int]:
        """Where these are, until `complete_load`."""
        for block_hash in hashes:
            self._idle.pop(block_hash, None)
            self._loading[block_hash] = self._loading.get(block_hash, 0) + 1
        return [self._place[block_hash] for block_hash in hashes]

    def complete_load(self, hashes: Sequence[bytes]) -> None:
        """A step that loads them is decided, or they are not needed."""
        for block_hash in reversed(hashes):
            self._loading[block_hash] -= 1
            if not self._loading[block_hash]:
                del self._loading[block_hash]
                self._idle[block_hash] = None

    def prepare_store(self, block_hash: bytes) -> int | None:
        """A place for a block, which another one may lose; None if it has one already, or if all others are needed."""
        if block_hash in self._place or not (self._free or self._unused or self._idle):
            return None
        if self._free:
            place = self._free.pop()
        elif self._unused:
            place, self._unused = self._num_places - self._unused, self._unused - 1
        else:
            place = self._place.pop(self._idle.popitem(last=False)[0])
        self._place[block_hash] = place
        self._storing.add(block_hash)
        return place

    def complete_store(self, block_hash: bytes) -> None:
        """It is in its place."""
        self._storing.remove(block_hash)
        self._idle[block_hash] = None

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        used = [*self._place.values(), *self._free]
        assert sorted(used) == list(range(self._num_places - self._unused)), "a place is lost or used twice"
        states = [*self._storing, *self._loading, *self._idle]
        assert sorted(states) == sorted(self._place), "a block is in two states, or in none"
