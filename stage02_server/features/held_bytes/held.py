"""How much unfinished requests hold of one thing, such as images (vLLM has no such bound)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

from stage02_server.errors import RETRY_AFTER_SECONDS, APIError
from stage02_server.middleware import TENANT
from stage03_engine.plugins import find


class HeldBytes:
    """The bytes of one thing in all unfinished requests, `most` together. One of several API keys may hold half of them, so that the others find room; without
    several keys, an address may. A request whose key or address holds nothing else may have all."""

    def __init__(self, what: str, most: int, flag: str) -> None:
        self._what, self._most, self._flag = what, most, flag
        self.number = 0
        self._asker: Callable[[], int | str | None] = find("server", "asker") or TENANT.get
        self._of_askers: Counter[int | str | None] = Counter()

    def hold(self, size: int) -> Hold:
        """Hold so many more, for the key or address of the request that is being handled. Raises APIError 429 if there is no room for them."""
        hold = Hold(self, self._asker())
        hold.become(size)
        return hold

    def change(self, asker: int | str | None, held: int, size: int) -> None:
        """An asker holds `size` bytes in place of `held`. Where there is no room it holds none, and APIError 429 is raised."""
        self._count(-held, asker)
        if size and size > self._room(asker):
            message = (
                f"Unfinished requests hold {self.number} bytes of {self._what}; with this one they would hold more than "
                f"{self._most} ({self._flag}), or one API key or address more than half of that; try again later."
            )
            raise APIError(429, "RateLimitError", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
        self._count(size, asker)

    def _room(self, asker: int | str | None) -> int:
        """How many more a key or address may hold. A Unix socket has no address: whoever is behind it may be anybody."""
        left, held = self._most - self.number, self._of_askers[asker]
        return min(left, self._most // 2 - held) if held and asker not in (None, "") else left

    def _count(self, size: int, asker: int | str | None) -> None:
        self.number += size
        self._of_askers[asker] += size
        if not self._of_askers[asker]:
            del self._of_askers[asker]


class Hold:
    """What one request holds: a `with` block, after which it is given back, unless it has been passed on."""

    def __init__(self, held: HeldBytes, asker: int | str | None) -> None:
        self._held, self._asker, self._size = held, asker, 0
        self._finalizer: weakref.finalize | None = None

    def become(self, size: int) -> None:
        """Hold `size` bytes from now on. Raises APIError 429 if there is no room for so many, and then holds none."""
        before, self._size = self._size, 0
        self._held.change(self._asker, before, size)
        self._size = size

    def pass_on(self, owner: object) -> None:
        """Hold them until `owner` is garbage-collected, rather than until the block ends or the owner before is."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(owner, self.become, 0)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        if self._finalizer is None or not self._finalizer.alive:
            self.become(0)
