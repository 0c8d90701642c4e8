"""Strangers who flood a port: so many connections at once, each of which comes again as soon as it is cut, or has not got in for a moment."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

AGAIN_SECONDS = 1.0
MOST_TRIES = 200  # in a row, before those that have got in are looked at


class Flood:
    """Runs in a thread. Stranger number n says beginnings[n], and then nothing."""

    def __init__(self, place: tuple[str, int], beginnings: Sequence[bytes], many: int, again: float) -> None:
        self._place, self._again = place, again
        self._names, self._words = itertools.count(), itertools.cycle(beginnings)
        self._selector = selectors.DefaultSelector()
        self._outside: dict[socket.socket, float] = {}  # since when
        self.inside = 0
        """How many have got in so far."""
        self._is_over = threading.Event()
        self._many = many
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)
        self._thread.start()

    def _come(self) -> None:
        name, stranger = next(self._names), socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(OSError):  # no port is left for this address: others are
            stranger.bind((f"127.0.{1 + name % 3}.{2 + name % 200}", 0))
            stranger.connect_ex(self._place)
        self._outside[stranger] = time.monotonic()
        self._selector.register(stranger, selectors.EVENT_WRITE, next(self._words))

    def _come_again(self, stranger: socket.socket) -> None:
        self._leave(stranger)
        self._come()

    def _leave(self, stranger: socket.socket) -> None:
        self._outside.pop(stranger, None)
        self._selector.unregister(stranger)
        stranger.close()

    def _run(self) -> None:
        for _ in range(self._many):
            self._come()
        while not self._is_over.is_set():
            for key, events in self._selector.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                if events & selectors.EVENT_WRITE:
                    self._get_in(key.fileobj, key.data)
                elif _is_cut(key.fileobj):
                    self._come_again(key.fileobj)
            for stranger, since in list(itertools.islice(self._outside.items(), MOST_TRIES)):
                if time.monotonic() - since > self._again:
                    self._come_again(stranger)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            self._leave(key.fileobj)
        self._selector.close()

    def _get_in(self, stranger: socket.socket, words: bytes) -> None:
        self._outside.pop(stranger, None)
        try:
            stranger.send(words)
        except OSError:  # it was turned away
            return self._come_again(stranger)
        self.inside += 1
        self._selector.modify(stranger, selectors.EVENT_READ)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def _is_cut(stranger: socket.socket) -> bool:
    try:
        return not stranger.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def flooded(
    place: tuple[str, int], beginnings: Sequence[bytes], many: int, again: float = AGAIN_SECONDS
) -> Iterator[Flood]:
    """Inside the `with` block strangers flood the port."""
    flood = Flood(place, beginnings, many, again)
    try:
        yield flood
    finally:
        flood.close()
