"""Who is next: keys take turns, and within a key its HTTP requests; within those, who came first.

Between two turns of a key each other key has at most one, however much it has queued. vLLM has no counterpart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Set
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Asker(NamedTuple):
    """Whose turn it is: the number of an API key (None: there is only one), and an HTTP request."""

    tenant: int | None
    group: str


class Turns(Generic[T]):
    """A queue of queues; `add` takes O(1), and `pop` O(keys that rest)."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[int | None, OrderedDict[str, deque[T]]] = OrderedDict()  # none of them empty

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, asker: Asker, item: T) -> None:
        """Queue an item behind those of the same HTTP request; a new key, or HTTP request, has its turn last."""
        self._tenants.setdefault(asker.tenant, OrderedDict()).setdefault(asker.group, deque()).append(item)

    @property
    def tenants(self) -> Set[int | None]:
        """The keys that have something queued."""
        return self._tenants.keys()

    def pop(self, resting: Collection[int | None] = ()) -> T:
        """The next item; the turn passes on. Keys that rest are passed over. Raises StopIteration if there is none."""
        tenant = next(tenant for tenant in self._tenants if tenant not in resting)
        groups = self._tenants.pop(tenant)
        group, items = groups.popitem(last=False)
        item = items.popleft()
        if items:
            groups[group] = items
        if groups:
            self._tenants[tenant] = groups
        return item
