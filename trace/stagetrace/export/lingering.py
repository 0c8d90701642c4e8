"""When may a request be forgotten? This bounds the memory of an export, whatever the recording's length."""

from __future__ import annotations

from collections import OrderedDict

from stagetrace.event import Event

MAX_LINGERING = 1024
_ENDS = {"request.finished", "request.aborted", "request.refused", "http.response"}


class Lingering:
    """Requests that have ended but may appear again: the last chunk follows the end, and of several answers one ends first.

    The one unseen for longest is dropped when there are more than `MAX_LINGERING`.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, None] = OrderedDict()

    def hear(self, key: str, event: Event) -> str | None:
        """Note an event of the request `key`; return a request that may be forgotten."""
        if event.name in _ENDS or key in self._ended:
            self._ended[key] = None
            self._ended.move_to_end(key)
        return self._ended.popitem(last=False)[0] if len(self._ended) > MAX_LINGERING else None
