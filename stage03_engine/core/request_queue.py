"""The order in which requests wait and run (vllm/v1/core/sched/request_queue.py)."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from stage03_engine.core.request import Request

POLICIES: dict[str, Callable[[Request], tuple[int, ...]]] = {
    "fcfs": lambda request: (request.arrival,),
    "priority": lambda request: (request.priority, request.arrival),
}
"""Scheduling policy -> sort key: the smallest goes first. Arrival breaks every tie, so no two keys are equal."""


class RequestQueue:
    """Requests in the order of a policy.

    A preempted request that comes back stands where it belongs by its key; under `fcfs` that is the front, because all that
    waits arrived later. Lists are short (hundreds), so a sorted list beats a heap: it can be iterated, indexed and searched.
    """

    def __init__(self, policy: str) -> None:
        self._key = POLICIES[policy]
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Insert at the place that the policy says."""
        insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._requests.remove(request)

    def pop_last(self) -> Request:
        """Take out the request that matters least."""
        return self._requests.pop()

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
