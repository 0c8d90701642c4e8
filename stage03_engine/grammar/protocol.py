"""What the engine and a grammar process say to each other."""

from __future__ import annotations

import io
from typing import IO, Any

import msgspec

Stream = IO[bytes] | io.BufferedRWPair | io.BufferedReader
OPEN, ACCEPT, CLOSE = 0, 1, 2
FORK, ASK = b"f", b"?"  # to the template process, each followed by the number of a grammar process (4 bytes)


class MatcherState(msgspec.Struct, array_like=True):
    """Where a request stands. `mask` has a bit for each token id, lowest bit first, in little-endian words of 32: 1 = may come
    next. It is empty when the output is `complete` or the request is `stuck`: the token was not allowed, or none is."""

    mask: bytes
    complete: bool = False
    stuck: bool = False


def read_message(stream: Stream) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    body = stream.read(int.from_bytes(head, "little"))
    return msgspec.msgpack.decode(body)


def frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def write_message(stream: Stream, message: Any) -> None:
    """Send one message."""
    stream.write(frame(message))
    stream.flush()
