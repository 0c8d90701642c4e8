"""How much unfinished requests hold of one thing, such as images (vLLM has no such bound)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError
from stage02_server.middleware import TENANT


class HeldBytes:
    """The bytes of one thing in all unfinished requests, `most` together. One of several API keys has half of them at most, so that the others find
    room; a request that comes alone for its key may have all."""

    def __init__(self, what: str, most: int, flag: str) -> None:
        self._what, self._most, self._flag = what, most, flag
        self.number = 0
        self._of_keys: Counter[int | None] = Counter()

    @contextmanager
    def during(self, size: int) -> Iterator[Callable[[int], None]]:
        """They are held while the block runs, which may say that they have become another number. Both raise APIError 429 if there is no room
        for so many."""
        key, held = TENANT.get(), 0

        def become(size: int) -> None:
            nonlocal held
            self._hold(-held, key)
            held = 0
            if size > self._room(key):
                message = (
                    f"Unfinished requests hold {self.number} bytes of {self._what}, and with this one it would be more than "
                    f"{self._most} ({self._flag}), or than half of them for one API key; try again later."
                )
                raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
            self._hold(size, key)
            held = size

        become(size)
        try:
            yield become
        finally:
            self._hold(-held, key)

    def until_gone(self, owner: object, size: int) -> None:
        """They are held until nobody has `owner` any more."""
        key = TENANT.get()
        self._hold(size, key)
        weakref.finalize(owner, self._hold, -size, key)

    def _room(self, key: int | None) -> int:
        """How many more a key may hold."""
        left = self._most - self.number
        return min(left, self._most // 2 - self._of_keys[key]) if key is not None and self._of_keys[key] else left

    def _hold(self, size: int, key: int | None) -> None:
        self.number += size
        self._of_keys[key] += size
        if not self._of_keys[key]:
            del self._of_keys[key]
