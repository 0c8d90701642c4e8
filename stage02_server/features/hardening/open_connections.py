"""`--max-connections`: each connection is an open file, of which a process has only so many (uvicorn: accepts until none is left, and then
nobody can connect, and the log and the engine's sockets fail as well).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Protocol


class Connection(Protocol):
    """What must be closed when there are too many."""

    def end_idle(self) -> None:
        """Close it: no request of it waits for an answer."""


@dataclass
class OpenConnections:
    """The connections of one server. One beyond the limit takes the place of the one that has been idle for the longest time; where
    none is idle it is itself too much.

    Invariant: `idle` holds connections that are open and owe or are owed nothing, the longest idle one first.
    """

    most: int
    open: set[Connection] = field(default_factory=set)
    idle: dict[Connection, None] = field(default_factory=dict)

    def add(self, connection: Connection) -> bool:
        """A client has connected. False if there is no room for it."""
        self.open.add(connection)
        if len(self.open) <= self.most:
            return True
        if not self.idle:
            return False
        longest = next(iter(self.idle))
        self.discard(longest)  # it counts until its end otherwise, and that takes a turn of the event loop
        longest.end_idle()
        return True

    def rest(self, connection: Connection) -> None:
        """It has its answers, and has asked for nothing more."""
        if connection in self.open:
            self.idle[connection] = None

    def wake(self, connection: Connection) -> None:
        """It asks for something."""
        self.idle.pop(connection, None)

    def discard(self, connection: Connection) -> None:
        """It has closed."""
        self.open.discard(connection)
        self.idle.pop(connection, None)


def most_connections(wanted: int | None) -> int:
    """The limit: what `--max-connections` says, or three quarters of the files that the process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = 65536 if files == resource.RLIM_INFINITY else files - files // 4
    return room if wanted is None else min(wanted, room)
