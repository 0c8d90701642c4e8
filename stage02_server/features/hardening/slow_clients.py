"""How long a client may take to send a request and to read its answer, and how many may take their time at once.

Without these limits a stranger can open connections, send a byte of a header on each, and use up memory and file descriptors
until nobody else can connect; or ask for a long stream and never read it. (vLLM and uvicorn only end connections that idle between two
requests.)
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass, field
from typing import Any

from stage02_server.errors import APIError, unavailable
from stage02_server.features.hardening.authentication import OPEN_PATHS
from stage02_server.features.hardening.connection_limits import PipelinedHttpProtocol
from stage02_server.features.hardening.connection_turns import ParsingTurns, StartingTurns
from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.hardening.open_connections import OpenConnections, most_connections
from stage02_server.middleware import CONNECTION
from stagetrace import trace

BODY_BYTES_PER_SECOND = 8192  # a body that comes faster than this may take any time
MAX_UNFINISHED = 4096  # connections with a request that has not arrived in full
MAX_UNFINISHED_BYTES = 1024**3  # of all those requests together


@dataclass
class Unfinished:
    """The connections of one server whose request has not arrived in full, the oldest first. Beyond a limit the oldest is
    closed: a client that sends without delay is never the oldest for long."""

    max_connections: int
    connections: dict[TimedHttpProtocol, int] = field(default_factory=dict)  # -> bytes that it has sent
    num_bytes: int = 0

    def grow(self, connection: TimedHttpProtocol, num_bytes: int) -> None:
        """So many bytes came for a request that is not complete."""
        self.connections[connection] = self.connections.get(connection, 0) + num_bytes
        self.num_bytes += num_bytes
        while len(self.connections) > self.max_connections or self.num_bytes > MAX_UNFINISHED_BYTES:
            self.end_oldest()

    def end_oldest(self) -> bool:
        """Make room for another. False if there is none that has to send anything."""
        if not self.connections:
            return False
        oldest = next(iter(self.connections))
        self.discard(oldest)
        oldest.opened.discard(oldest)  # its end takes a turn of the event loop
        oldest.end_slow("crowded", "Too many requests arrive slowly; send this one in one go.")
        oldest.let_go()
        return True

    def discard(self, connection: TimedHttpProtocol) -> None:
        """Its request is complete, or it has closed."""
        self.num_bytes -= self.connections.pop(connection, 0)


class TimedHttpProtocol(PipelinedHttpProtocol):
    """A connection with a deadline for what its client must do next: send the header, send the body, read the answer.

    Invariant: one of the two timers runs while the client has to act; none while the client waits, or while nothing is read from
    it because it is ahead. Between two requests uvicorn's own timer runs (`--timeout-keep-alive`).
    """

    header_seconds: float
    body_seconds: float
    stall_seconds: float
    unfinished: Unfinished
    opened: OpenConnections

    _receiving = "header"  # what the client must send: "header", "body", or "" when it waits for an answer
    _timed = ""  # which of these the timer is for
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _began = 0.0
    _received = 0  # bytes since then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From asyncio: a client has connected and must send a header."""
        super().connection_made(transport)
        if not (self.opened.add(self) or self.unfinished.end_oldest()):
            self._ended("full")
            self._send_error(unavailable("Too many connections (--max-connections)."), b"503 Service Unavailable")
            return
        waiting = transport.get_write_buffer_size
        self._connection: dict[object, object] = {"abort": transport.abort, "waiting": waiting, "transport": transport}
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio: nothing more will come. uvicorn notifies only the latest request; an earlier one must know too."""
        self._stop_timers()
        self.opened.discard(self)
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        """From asyncio: bytes, perhaps of several requests."""
        self._received += len(data)
        super().data_received(data)
        if not (self._refused or self.transport.is_closing()):
            self._time_request(len(data))

    def parse_held(self) -> None:
        """What was held back is parsed."""
        uncounted = len(self._held) if self._ahead else 0
        super().parse_held()
        if not (self._refused or self.transport.is_closing()):
            self._time_request(uncounted)

    def on_message_begin(self) -> None:
        """Parser callback: a new request."""
        self.opened.wake(self)
        super().on_message_begin()
        self._receiving = "header"

    def on_headers_complete(self) -> None:
        """Parser callback: the request starts to run, or waits for the one before it."""
        super().on_headers_complete()
        if self._offers:
            return
        self._receiving = "body"
        self.scope["extensions"] = {CONNECTION: self._connection}

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete."""
        super().on_message_complete()
        self._receiving, self._timed = "", "done"  # a timer for the next request is a new one

    # Arrival

    def _time_request(self, num_bytes: int = 0) -> None:
        """Start, keep or stop the timer, by what is still missing."""
        answered = self.cycle is None or self.cycle.response_complete
        what = self._receiving or ("header" if answered else "")  # bytes after an answer are a request, or nonsense
        what = "" if self._ahead else what
        if what != self._timed:
            self._stop_timer()
            self._timed, self._began, self._received = what, time.monotonic(), 0
            seconds = self.header_seconds if what == "header" else self.body_seconds
            if what and seconds:
                self._timer = self.loop.call_later(seconds, self._check_arrival)
        if what:
            self.unfinished.grow(self, num_bytes)

    def _check_arrival(self) -> None:
        limit = self.header_seconds
        if self._timed == "body":
            limit = self.body_seconds + self._received / BODY_BYTES_PER_SECOND
        waits_for_us = (
            self._flow.read_paused
            or self.pipeline
            or (self._timed == "header" and any(not c.response_complete for c in self._cycles))
        )
        left = limit if waits_for_us else self._began + limit - time.monotonic()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_arrival)
        else:
            what = self._timed
            message = f"The {what} of the request did not arrive within {limit:.0f} s (--request-{what}-timeout)."
            self.end_slow(what, message)

    def end_slow(self, reason: str, message: str) -> None:
        """Close the connection; with a 408 if a request has begun and nothing of an answer was sent."""
        self._stop_timers()
        running = [cycle for cycle in self._cycles if not cycle.response_complete]
        begun = len(running) == 1 if self._timed == "body" else self._incomplete > 0 and not running
        self._ended(reason)
        if begun and not any(cycle.response_started for cycle in running):
            self._send_error(APIError(408, "BadRequestError", message), b"408 Request Timeout")
        else:
            self.transport.close()
            self._watch_buffer()

    # Reading the answer

    def _send_error(self, error: APIError, phrase: bytes, linger: bool = False) -> None:
        """Answer without the application, and end the connection, which waits until earlier answers are read as well."""
        self._stop_timer()  # it has nothing more to send, and no second error to read
        super()._send_error(error, phrase, linger)
        self._watch_buffer()

    def pause_writing(self) -> None:
        """From asyncio: the client does not read as fast as we write."""
        super().pause_writing()
        self._watch_buffer()

    def resume_writing(self) -> None:
        """From asyncio: it has caught up."""
        super().resume_writing()
        self._stop_stall()

    def on_response_complete(self) -> None:
        """From uvicorn: the whole answer was handed to the transport, which may have to close as well."""
        super().on_response_complete()
        if self._receiving == "" and all(cycle.response_complete for cycle in self._cycles):
            self.opened.rest(self)
        if self.transport.is_closing():
            self._watch_buffer()

    def end_idle(self) -> None:
        """Another client needs the place."""
        self._ended("idle")
        self.transport.close()
        self.let_go()

    def let_go(self) -> None:
        """It has lost its place to another client, and nobody counts it any more: it must not stay because it does not read."""
        if self.transport.get_write_buffer_size():
            self._stop_timers()
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """From uvicorn: no further request came. Closing waits until all is written, forever if nobody reads."""
        super().timeout_keep_alive_handler()
        self._watch_buffer()

    def _watch_buffer(self) -> None:
        self._stop_stall()
        if self.stall_seconds and (size := self.transport.get_write_buffer_size()):
            self._stall = self.loop.call_later(self.stall_seconds, self._check_reading, size)

    def _check_reading(self, size_before: int) -> None:
        if self.transport.get_write_buffer_size() < size_before:
            self._watch_buffer()  # slow, but alive
        else:
            self._ended("unread")
            self.transport.abort()  # close() would wait for what is not read

    # Both

    def _ended(self, reason: str) -> None:
        if trace.on:
            trace.emit("connection.ended", reason=reason)

    def _stop_timer(self) -> None:
        self.unfinished.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stop_timers(self) -> None:
        self._stop_timer()
        self._stop_stall()


def timed_protocol(args: HardeningFlags) -> type[TimedHttpProtocol]:
    """The protocol class of one server; uvicorn makes an object of it per connection."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = MAX_UNFINISHED if files == resource.RLIM_INFINITY else files // 2  # the other half is for everything else
    settings: dict[str, Any] = {
        "max_bytes": args.h11_max_incomplete_event_size, "max_headers": args.h11_max_header_count,
        "header_seconds": args.request_header_timeout, "body_seconds": args.request_body_timeout,
        "stall_seconds": args.response_stall_timeout, "max_pipelined": args.max_pipelined_requests,
        "unfinished": Unfinished(min(MAX_UNFINISHED, room)), "opened": OpenConnections(most_connections(args.max_connections)),
        "turns": ParsingTurns(), "starts": StartingTurns(args.max_requests_per_address),
        "placeless": OPEN_PATHS | {(args.root_path or "") + path for path in OPEN_PATHS},
    }  # fmt: skip
    return type("HttpProtocol", (TimedHttpProtocol,), settings)
