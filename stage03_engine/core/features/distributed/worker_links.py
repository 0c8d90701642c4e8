"""How an executor and its workers exchange messages.

    on one machine           WorkerPipes   <- a Unix socket for each worker ->   PipeToExecutor
    over several machines    WorkerRouter  <- ZMQ over TCP, encrypted       ->   RouterToExecutor   (machines/links.py)

A message is (kind, payload, cause). ZMQ reads and writes in a thread of its own, so a message wakes two threads on each side: a round trip
costs 75 to 120 microseconds, and as much processor time on both sides. A plain socket wakes one thread, and costs 11 to 16. vLLM writes
into shared memory, which its workers poll without a pause: quicker still, but each worker keeps a core busy.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

Message = tuple[bytes, bytes, bytes]  # kind, payload, cause
SIZE_BYTES = 8
READ_BYTES = 1 << 16


class WorkerLinks(ABC):
    """The executor's ends of all links."""

    @abstractmethod
    def send(self, rank: int, message: Message) -> None:
        """Send without waiting for the worker to be idle. Raises OSError if it is gone."""

    @abstractmethod
    def receive(self, milliseconds: int) -> tuple[int, Message] | None:
        """(rank, message), in the order in which each rank sends; None if none comes in time."""

    @abstractmethod
    def close(self) -> None:
        """Close all links; what was not sent is dropped. May be called twice."""


class LinkToExecutor(ABC):
    """A worker's end."""

    @abstractmethod
    def send(self, *message: bytes) -> None:
        """Send (kind, payload, cause)."""

    @abstractmethod
    def receive(self) -> Message:
        """Wait for a message."""

    @abstractmethod
    def poll(self, milliseconds: int) -> bool:
        """Does a message come within this time?"""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, and close the link."""


class Stream:
    """Messages over a connected socket. Each is its total size, the sizes of cause and kind (a byte each), and then cause, kind and payload."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._read = bytearray()

    def read(self) -> list[Message] | None:
        """What has arrived, after a wait for more bytes; None at the end."""
        try:
            data = self.socket.recv(READ_BYTES)
        except ConnectionError:
            return None
        self._read += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages if data else None

    def _next(self) -> Message | None:
        end = SIZE_BYTES + int.from_bytes(self._read[:SIZE_BYTES], "little")
        if len(self._read) < max(end, SIZE_BYTES + 2):
            return None
        body = bytes(self._read[SIZE_BYTES:end])
        del self._read[:end]
        payload = 2 + body[0] + body[1]
        return body[2 + body[0] : payload], body[payload:], body[2 : 2 + body[0]]


def framed(kind: bytes, payload: bytes, cause: bytes = b"") -> bytes:
    """What `Stream` reads."""
    size = 2 + len(cause) + len(kind) + len(payload)
    return b"".join((size.to_bytes(SIZE_BYTES, "little"), bytes((len(cause), len(kind))), cause, kind, payload))


class WorkerPipes(WorkerLinks):
    """Invariant: the executor never waits for a worker that waits for the executor to read: what comes while it writes is kept."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._poller = select.poll()
        self._rank_of: dict[int, int] = {}  # by descriptor
        self._inbox: deque[tuple[int, Message]] = deque()

    def add(self) -> socket.socket:
        """A link to the next rank; returns the worker's end."""
        ours, theirs = socket.socketpair()
        self._rank_of[ours.fileno()] = len(self._streams)
        self._streams.append(Stream(ours))
        self._poller.register(ours, select.POLLIN)
        return theirs

    def send(self, rank: int, message: Message) -> None:
        left, sock = memoryview(framed(*message)), self._streams[rank].socket
        while left:
            try:
                left = left[sock.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._poller.modify(sock, select.POLLIN | select.POLLOUT)
                self._wait(None)
                self._poller.modify(sock, select.POLLIN)

    def receive(self, milliseconds: int) -> tuple[int, Message] | None:
        deadline = time.monotonic() + milliseconds / 1000
        while not self._inbox and self._wait(milliseconds):  # a piece of a large message
            milliseconds = max(0, round(1000 * (deadline - time.monotonic())))
        return self._inbox.popleft() if self._inbox else None

    def _wait(self, milliseconds: int | None) -> bool:
        """Read what comes within this time; True if something has come and no link has ended."""
        events = self._poller.poll(milliseconds)
        ended = False
        for descriptor, event in events:
            if event == select.POLLOUT:
                continue
            messages = self._streams[rank := self._rank_of[descriptor]].read()
            if messages is None:  # it has ended; the thread that waits for its process reports it
                self._poller.unregister(descriptor)
                ended = True
            self._inbox.extend((rank, message) for message in messages or ())
        return bool(events) and not ended

    def close(self) -> None:
        for stream in self._streams:
            stream.socket.close()


class PipeToExecutor(LinkToExecutor):
    """The worker's end of a WorkerPipes' link, as a descriptor that it inherits."""

    def __init__(self, descriptor: int) -> None:
        self._stream = Stream(socket.socket(fileno=descriptor))
        self._inbox: deque[Message] = deque()
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)

    def send(self, *message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the executor is gone, and so is this process soon
            self._stream.socket.sendall(framed(*message))

    def receive(self) -> Message:
        while not self._inbox:
            messages = self._stream.read()
            if messages is None:
                threading.Event().wait()  # as in `send`
            self._inbox.extend(messages or ())
        return self._inbox.popleft()

    def poll(self, milliseconds: int) -> bool:
        return bool(self._inbox or self._poller.poll(milliseconds))

    def close(self) -> None:
        self._stream.socket.close()
