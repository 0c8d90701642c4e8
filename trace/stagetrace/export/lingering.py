"""When may a request be forgotten? So that an export of a recording of any length needs little memory."""

from __future__ import annotations

from collections import OrderedDict

from stagetrace.event import Event

MAX_LINGERING = 1024
_ENDS = {"request.finished", "request.aborted", "request.refused", "http.response"}


class Lingering:
    """Requests that have ended but may be heard of again: the last chunk follows the end, and of several answers one ends first.

    The one that was not heard of for longest is given up when there are more than `MAX_LINGERING`.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, None] = OrderedDict()

    def hear(self, key: str, event: Event) -> str | None:
        """Take note of an event of the request `key`; returns a request that may be forgotten."""
        if event.name in _ENDS or key in self._ended:
            self._ended[key] = None
            self._ended.move_to_end(key)
        return self._ended.popitem(last=False)[0] if len(self._ended) > MAX_LINGERING else None
