"""Whose vectors the encoder has computed, and which may make room (vllm/v1/core/encoder_cache_manager.py). No tensors: the model runner
holds the vectors, and is told which to compute and to drop."""

from __future__ import annotations

from collections import OrderedDict


class EncoderCacheManager:
    """Room for the vectors of so many places.

    What a request needs is pinned until the request has computed those places. Then it may be dropped, the longest-unused first, but only
    when room is needed: until then another request with the same picture finds it.
    Invariant: what is pinned and what may be dropped add up to `cache_size - num_free`, and a picture is in one of the two.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = self.num_free = cache_size
        self.pinned: dict[str, set[str]] = {}  # picture -> the requests that need it
        self.lengths: dict[str, int] = {}  # of all that are there
        self.freeable: OrderedDict[str, None] = OrderedDict()
        self.evicted: list[str] = []  # since the last `take_evicted`

    def pin(self, picture: str, request_id: str) -> bool:
        """Keep a picture for a request. False if it is not there."""
        if picture not in self.lengths:
            return False
        self.freeable.pop(picture, None)
        self.pinned.setdefault(picture, set()).add(request_id)
        return True

    def can_allocate(self, length: int) -> bool:
        """Is there room for a picture, perhaps after others were dropped?"""
        return length <= self.num_free + sum(self.lengths[picture] for picture in self.freeable)

    def allocate(self, picture: str, length: int, request_id: str) -> None:
        """Make room for a picture that will be computed in this step, and pin it."""
        while self.num_free < length:
            self._evict()
        self.num_free -= length
        self.lengths[picture], self.pinned[picture] = length, {request_id}

    def release(self, picture: str, request_id: str) -> None:
        """The request does not need the picture any more; nothing happens if it did not."""
        holders = self.pinned.get(picture)
        if holders is None or request_id not in holders:
            return
        holders.discard(request_id)
        if not holders:
            del self.pinned[picture]
            self.freeable[picture] = None

    def forget(self, picture: str) -> None:
        """It was allocated, and will not be computed after all."""
        self.pinned.pop(picture, None)
        self.freeable.pop(picture, None)
        self._remove(picture)

    def reset(self) -> None:
        """Drop what nobody needs."""
        while self.freeable:
            self._evict()

    def _evict(self) -> None:
        dropped, _ = self.freeable.popitem(last=False)
        self._remove(dropped)
        self.evicted.append(dropped)

    def _remove(self, picture: str) -> None:
        self.num_free += self.lengths.pop(picture)

    def take_evicted(self) -> list[str]:
        """What the runner is to drop."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        assert self.lengths.keys() == self.pinned.keys() | self.freeable.keys(), "a picture is neither pinned nor free"
        assert not self.pinned.keys() & self.freeable.keys(), "a picture is pinned and free"
        assert all(self.pinned.values()), "a picture is pinned by nobody"
        assert sum(self.lengths.values()) + self.num_free == self.cache_size, "the encoder cache lost count"
        assert self.num_free >= 0, "the encoder cache is fuller than it is large"
