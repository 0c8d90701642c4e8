"""How other threads, and signals, reach a thread that waits for sockets."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Letters for one thread, which waits for `fileno` among its sockets. `put` never waits, and may be called from a signal handler."""

    def __init__(self) -> None:
        self._letters: deque[T] = deque()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Has input when there are letters."""
        return self._reader.fileno()

    def put(self, letter: T) -> None:
        """Leave a letter. One that comes too late is dropped."""
        self._letters.append(letter)
        with contextlib.suppress(OSError):  # full: then there is input already; closed: nobody reads
            self._writer.send(b"\0")

    def take(self) -> list[T]:
        """All letters, in the order in which they came."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        return [self._letters.popleft() for _ in range(len(self._letters))]

    def close(self) -> None:
        """Nobody reads from now on."""
        self._reader.close()
        self._writer.close()
