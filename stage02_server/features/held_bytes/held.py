"""How much unfinished requests hold of one thing, such as images (vLLM has no such bound)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError
from stage02_server.middleware import TENANT
from stage03_engine.plugins import find


class HeldBytes:
    """The bytes of one thing in all unfinished requests, `most` together. One of several API keys has half of them at most, and without several keys an address, so
    that the others find room; a request that comes alone for its key, or address, may have all."""

    def __init__(self, what: str, most: int, flag: str) -> None:
        self._what, self._most, self._flag = what, most, flag
        self.number = 0
        self._asker: Callable[[], int | str | None] = find("server", "asker") or TENANT.get
        self._of_askers: Counter[int | str | None] = Counter()

    @contextmanager
    def during(self, size: int) -> Iterator[Callable[[int], None]]:
        """They are held while the block runs, which may correct their number. Both raise APIError 429 if there is no room
        for so many."""
        asker, held = self._asker(), 0

        def become(size: int) -> None:
            nonlocal held
            self._hold(-held, asker)
            held = 0
            if size > self._room(asker):
                message = (
                    f"Unfinished requests hold {self.number} bytes of {self._what}, and with this one it would be more than "
                    f"{self._most} ({self._flag}), or than half of them for one API key or address; try again later."
                )
                raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
            self._hold(size, asker)
            held = size

        become(size)
        try:
            yield become
        finally:
            self._hold(-held, asker)

    def until_gone(self, owner: object, size: int) -> None:
        """They are held until `owner` is garbage-collected."""
        asker = self._asker()
        self._hold(size, asker)
        weakref.finalize(owner, self._hold, -size, asker)

    def _room(self, asker: int | str | None) -> int:
        """How many more a key or address may hold. A Unix socket has no address: whoever is behind it may be anybody."""
        left, held = self._most - self.number, self._of_askers[asker]
        return min(left, self._most // 2 - held) if held and asker not in (None, "") else left

    def _hold(self, size: int, asker: int | str | None) -> None:
        self.number += size
        self._of_askers[asker] += size
        if not self._of_askers[asker]:
            del self._of_askers[asker]
