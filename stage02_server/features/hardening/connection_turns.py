"""The turns that connections take: what parsing, and beginning to answer, may take of one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Protocol

PARSING_SECONDS = 0.002  # of a turn of the event loop, for all connections together, beyond the first piece of each
FIRST_SECONDS = 0.02  # and with the first pieces: thousands of connections may bring one in the same turn
STARTS = 8  # requests that begin in one turn of the event loop: a millisecond or two of small ones


class Connection(Protocol):
    """What waits for its turn to be parsed."""

    def parse_held(self) -> None:
        """Go on."""


class _Turns:
    """What many connections share of one turn of the event loop."""

    def __init__(self) -> None:
        self._context = copy_context()  # not that of the request that happens to be served when a turn is asked for
        self._called = False

    def _call(self) -> None:
        """Have `_next_turn` called in the next turn of the loop."""
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._begin_turn, context=self._context)

    def _begin_turn(self) -> None:
        self._called = False
        if self._next_turn():
            self._call()

    def _next_turn(self) -> bool:
        """Go on with those who wait. True if there is to be another turn."""
        raise NotImplementedError


class ParsingTurns(_Turns):
    """What parsing may take of one turn of the event loop, over all connections of a server. The first piece from a connection is
    parsed at once, so that a client who sends little does not wait. With more it waits in line, and nothing is read from it. When there
    are so many connections that even the first pieces take long, the rest of those wait in line as well.

    Invariant: while a connection is in line, there will be another turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._line: dict[Connection, None] = {}  # the longest wait first
        self._seconds = 0.0  # of this turn, so far

    def is_over(self, first: bool = False) -> bool:
        """True if parsing has had its time in this turn; the first piece that a connection brings may take more of it."""
        return self._seconds >= (FIRST_SECONDS if first else PARSING_SECONDS)

    def spent(self, seconds: float) -> None:
        """A piece took so long."""
        self._seconds += seconds
        self._call()

    def join(self, connection: Connection) -> None:
        """What the connection holds is parsed when those before it have had their turn; never right now."""
        self._line[connection] = None
        self._call()

    def leave(self, connection: Connection) -> None:
        """It has closed."""
        self._line.pop(connection, None)

    def _next_turn(self) -> bool:
        self._seconds = 0.0
        for connection in list(self._line):
            if self.is_over():
                break
            self._line.pop(connection, None)
            connection.parse_held()
        return bool(self._line)


@dataclass(eq=False)
class Start:
    """A request that is to begin."""

    address: str  # whence it comes; "" if there is none
    takes_place: bool  # of those that its address has
    begin: Callable[[], None]

    def go(self) -> None:
        """Begin. What it takes is forgotten: it knows this object, and a cycle of every request is work for the garbage collector."""
        begin, self.begin = self.begin, _nothing
        begin()


def _nothing() -> None:
    pass


Starts = dict[Start, None]  # the longest wait first


class StartingTurns(_Turns):
    """Requests begin a few at a time, and addresses take turns: a client with a thousand connections keeps no other waiting.
    Of one address at most `places` requests that need a place are in flight; the others wait, first come, first served.

    Invariants: while somebody waits for a turn, there will be another one. Those of an address wait for a place only while all of
    its places are taken. No queue is empty.
    """

    def __init__(self, places: int) -> None:
        super().__init__()
        self._places = places  # 0: no limit
        self._began = 0  # in this turn
        self._taken: dict[str, int] = {}  # address -> places
        self._without_place: dict[str, Starts] = {}
        self._ready: OrderedDict[str, Starts] = OrderedDict()  # the address whose turn is next comes first

    def add(self, start: Start) -> None:
        """Begin it: at once, or when its turn comes."""
        start.takes_place = start.takes_place and self._places > 0
        if start.takes_place:
            if self._taken.get(start.address, 0) >= self._places:
                self._without_place.setdefault(start.address, {})[start] = None
                return
            self._taken[start.address] = self._taken.get(start.address, 0) + 1
        self._begin_or_wait(start)

    def end(self, start: Start) -> None:
        """It has begun, and ended. Its place goes to the request that has waited longest."""
        if not start.takes_place:
            return
        if waiting := self._without_place.get(start.address):
            first = next(iter(waiting))
            _remove(self._without_place, first)
            self._begin_or_wait(first)
            return
        self._taken[start.address] -= 1
        if not self._taken[start.address]:
            del self._taken[start.address]

    def withdraw(self, start: Start) -> None:
        """Its client has gone. If it waits, it never begins."""
        _remove(self._without_place, start)
        if _remove(self._ready, start):
            self.end(start)

    def _begin_or_wait(self, start: Start) -> None:
        self._call()
        if self._began < STARTS and not self._ready:
            self._began += 1
            start.go()
        else:
            self._ready.setdefault(start.address, {})[start] = None

    def _next_turn(self) -> bool:
        self._began = 0
        while self._ready and self._began < STARTS:
            self._began += 1
            start = next(iter(next(iter(self._ready.values()))))
            _remove(self._ready, start)
            if start.address in self._ready:
                self._ready.move_to_end(start.address)
            start.go()
        return self._began > 0


def _remove(queues: dict[str, Starts], start: Start) -> bool:
    """True if it was in the queue of its address."""
    queue = queues.get(start.address, {})
    if start not in queue:
        return False
    del queue[start]
    if not queue:
        del queues[start.address]
    return True
