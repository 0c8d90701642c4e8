"""What a stranger can cost a socket between machines, before it is known whether he has the secret.

Two things bound it. No frame may be longer than PIECE, so a peer that announces eight gigabytes is cut off at once: what the machines
send each other travels in pieces. And only so many connections may be open: above that the system drops whatever comes to the listening
socket, until some of them have ended. Those that have not shown the secret by then do not wait for the end of their handshake's time: they
make room at once, so that a machine can join while strangers flood the port. (Linux only. vLLM bounds neither.)
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

PIECE = 1 << 16
"""Bytes of a frame at most."""
MAX_FRAME = PIECE + 1024
"""The same with what CURVE adds to it, and room for the commands of a handshake."""
MOST_CONNECTIONS = 256
"""Open ones of a listener, with the secret or without it yet. A service has at most 64 engines or as many workers."""
PATIENCE_SECONDS = 0.25
"""For a connection that says nothing, once there are so many: a machine with the secret shows it in three trips over the network."""
TURN_MS = 50
_SHOWN = 100
"""Bytes of ours that have reached the peer: the greeting has 64, and CurveZMQ's answer to one who knows the secret 170."""
_BYTES_ACKED = 120  # where struct tcp_info has it
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CONNECTIONS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS = FAILED | _CONNECTIONS | zmq.EVENT_MONITOR_STOPPED
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of socket(7); Python has no names for them
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # of struct sock_filter: BPF_RET | BPF_K, keep 0 bytes


class SocketOfPieces(zmq.Socket[bytes]):
    """A DEALER or ROUTER whose `send_multipart` and `recv_multipart` know no limit although a frame has one.

    What travels is a frame that says how many pieces each frame of the message has, or nothing if each has one, and then the pieces. Other
    ways to send or receive do not go together with it.
    """

    def send_multipart(self, msg_parts: Sequence[Any], flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        """See zmq.Socket."""
        own = int(self.type == zmq.ROUTER)  # it names the peer first
        counts, pieces = list[int](), list[Any]()
        for frame in msg_parts[own:]:
            view = memoryview(frame)
            counts.append(max(1, -(-len(view) // PIECE)))
            pieces += [view[place * PIECE : (place + 1) * PIECE] for place in range(counts[-1])]
        head = msgspec.msgpack.encode(counts) if len(pieces) > len(counts) else b""
        return super().send_multipart([*msg_parts[:own], head, *pieces], flags, *args, **kwargs)

    def recv_multipart(self, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        """See zmq.Socket. What fits no message is returned as it came: decoding will refuse it."""
        own = int(self.type == zmq.ROUTER)
        name, (head, *pieces) = (frames := super().recv_multipart(flags, *args, **kwargs))[:own], frames[own:]
        if not head:
            return [*name, *(pieces or [head])]
        try:
            counts = msgspec.msgpack.decode(head, type=list[int])
        except msgspec.MsgspecError:
            return frames
        if not counts or min(counts) < 1 or sum(counts) != len(pieces):
            return frames
        rest = iter(pieces)
        return [*name, *(b"".join(next(rest) for _ in range(count)) for count in counts)]


class Door:
    """Watches a listening socket, from before it is bound. A thread reads what ZMQ tells of its connections, for nothing may wait there."""

    def __init__(self, listener: zmq.Socket[bytes], most: int = MOST_CONNECTIONS) -> None:
        self._events, self._most = listener.get_monitor_socket(_EVENTS), most
        self.failures: zmq.Socket[bytes] = listener.context.socket(zmq.PAIR)
        """Has input when a handshake has failed."""
        self._failures = listener.context.socket(zmq.PAIR)
        for each in (self.failures, self._failures):
            each.set_hwm(100)  # nobody has to read them
            each.setsockopt(zmq.LINGER, 0)
        address = f"inproc://failures-{id(self):x}"
        self.failures.bind(address)
        self._failures.connect(address)
        self._listening, self._open = -1, dict[int, float]()
        """The listening socket, and since when each connection has been open."""
        self.is_closed = False
        """Are newcomers dropped now?"""
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):  # the context is destroyed
            while True:
                while self.is_closed and not self._events.poll(TURN_MS):
                    self._make_room()
                happened = parse_monitor_message(self._events.recv_multipart())
                if happened["event"] == zmq.EVENT_MONITOR_STOPPED:
                    break
                self._heard(happened["event"], happened["value"])
        self._events.close(linger=0)
        self._failures.close(linger=0)

    def _heard(self, event: int, value: int) -> None:
        """`value` is a descriptor, unless a handshake has failed."""
        if event & FAILED:
            with contextlib.suppress(zmq.Again):
                self._failures.send(b"", zmq.NOBLOCK)
        elif event == zmq.EVENT_LISTENING:
            self._listening = value
        elif event == zmq.EVENT_ACCEPTED:
            self._open[value] = time.monotonic()
        elif value == self._listening:
            self._listening = -1
        else:
            self._open.pop(value, None)
        is_full = len(self._open) >= self._most
        if is_full != self.is_closed and self._listening >= 0:
            self.is_closed = is_full
            _filter(self._listening, drop=is_full)

    def _make_room(self) -> None:
        """Whoever has been here for a while, and has not shown the secret, goes."""
        for connection, since in self._open.items():
            if time.monotonic() - since > PATIENCE_SECONDS:
                self._open[connection] = math.inf  # once is enough
                _cut_stranger(connection, self._listening)

    def close(self) -> None:
        """The listener's monitor has been disabled. May be called twice."""
        self._thread.join()
        self.failures.close(linger=0)


def _filter(listening: int, drop: bool) -> None:
    """From now on the system drops what comes to this listening socket, or no longer does. Connections that exist notice nothing."""
    instructions = ctypes.create_string_buffer(_DROP, len(_DROP))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))  # struct sock_fprog
    with contextlib.suppress(OSError), _copied(listening) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH if drop else _DETACH, program if drop else 0)


def _cut_stranger(connection: int, listening: int) -> None:
    """End a connection whose peer has not shown the secret. ZMQ may have closed it just now, and the number be that of another file."""
    with contextlib.suppress(OSError), _copied(connection) as sock, _copied(listening) as listener:
        if sock.getsockname()[1] != listener.getsockname()[1]:
            return
        [received] = struct.unpack_from("Q", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _BYTES_ACKED)
        if received < _SHOWN:
            sock.shutdown(socket.SHUT_RDWR)


def _copied(descriptor: int) -> socket.socket:
    return socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
