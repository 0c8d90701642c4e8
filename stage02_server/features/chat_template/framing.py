"""Messages over a pipe or a socket: length (4 bytes, little-endian), then msgpack."""

from __future__ import annotations

import io
from typing import IO, Any

import msgspec

Stream = IO[bytes] | io.BufferedRWPair | io.BufferedReader


def read_message(stream: Stream) -> Any:
    """The next message. Raises EOFError when the other side is gone, also in the middle of a message."""
    head = stream.read(4)
    size = int.from_bytes(head, "little")
    if len(head) < 4 or len(body := stream.read(size)) < size:
        raise EOFError
    return msgspec.msgpack.decode(body)


def write_message(stream: Stream, message: Any) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()
