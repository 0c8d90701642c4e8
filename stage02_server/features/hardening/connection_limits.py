"""What one connection may have the server keep: an incomplete request, and requests that wait (vLLM: the header's limits only).

The parser that uvicorn uses has no limit to a header. uvicorn also parses all that it reads and queues every request: a client that
reads nothing could hand over requests without end, and thousands of them came in one piece, which the event loop parsed while
all other clients waited.
"""

from __future__ import annotations

import asyncio
import sys

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stage02_server.errors import APIError, error_json

UPGRADE = b"upgrade"
LINES = 2  # the fewest of a request: the request line and an empty one
BYTES = 18  # and the fewest bytes: GET / HTTP/1.1, and two line ends


class _HeaderLimitError(Exception):
    """Raised in a parser callback to stop the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a limit to what it keeps while it waits: the number of header fields (trailers too), their
    bytes, and the bytes since anything was complete. Beyond, the answer is a 431 and the connection ends.

    A request that offers another protocol (Java's client offers HTTP/2 with each) is answered as if it did not, as the standard
    says. The parser would take all behind its header, also its body, for that protocol: so it gets the request again without the offer.

    Invariant: between two calls of `data_received` the parser holds at most `max_bytes` bytes of something incomplete, and
    what the last call brought.
    """

    max_bytes: int
    max_headers: int
    _num_headers = 0
    _header_bytes = 0
    _incomplete = 0  # bytes since the header, a piece of the body, or the request was complete
    _offers = False  # another protocol
    _piece = b""  # what is being parsed, then what is still to be

    def on_message_begin(self) -> None:
        """Parser callback: a new request."""
        super().on_message_begin()
        self._num_headers, self._header_bytes = 0, 0

    def on_url(self, url: bytes) -> None:
        """Parser callback: a piece of the request target."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback: one header field is complete."""
        super().on_header(name, value)
        self._num_headers += 1
        self._count(len(name) + len(value))

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._num_headers > self.max_headers or self._header_bytes > self.max_bytes:
            raise _HeaderLimitError

    def on_headers_complete(self) -> None:
        """Parser callback: the body follows."""
        self._incomplete = 0
        self._offers = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._offers:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Parser callback: a piece of the body."""
        self._incomplete = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete."""
        self._incomplete = 0
        if not self._offers:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """From uvicorn, while it handles the parser's HttpParserUpgrade, which says where the header ends."""
        error = sys.exception()
        assert error is not None
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        head += [b"%s: %s" % header for header in self.headers if header[0] != UPGRADE]
        self._piece = b"\r\n".join([*head, b"", self._piece[error.args[0] :]])

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        self._incomplete += len(data)
        while data:
            self._piece = data
            super().data_received(data)
            data = self._piece if self._piece is not data else b""
        self._piece = b""
        if self._incomplete > self.max_bytes and not self.transport.is_closing():
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: 431 if a limit stopped it, else 400. The same error object as everywhere."""
        if self._num_headers > self.max_headers or max(self._header_bytes, self._incomplete) > self.max_bytes:
            text = (
                f"The header may have at most {self.max_headers} fields (--h11-max-header-count) and {self.max_bytes} bytes "
                "(--h11-max-incomplete-event-size)."
            )
            error, phrase = APIError(431, "BadRequestError", text), b"431 Request Header Fields Too Large"
        else:
            error, phrase = APIError(400, "Bad Request", "This is not HTTP/1.1."), b"400 Bad Request"
        self._send_error(error, phrase)

    def _send_error(self, error: APIError, phrase: bytes) -> None:
        """Answer without the application, and close."""
        body = error_json(error).encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (phrase, len(body)) + body)
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's flow control. It resumes reading after every answer, and whenever a handler waits for its client; `full` forbids it."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


class PipelinedHttpProtocol(LimitedHttpProtocol):
    """HTTP/1.1 in which at most `max_pipelined` requests of a connection wait behind the one that is being answered, with headers of
    at most `max_bytes` together. What lies behind them is not parsed, and nothing more is read, until half of them have
    their answers: the client's own sending then comes to a halt, as TCP provides, and no request is refused.

    Invariant: nothing is held back unless the connection is full, and then nothing is read.
    """

    max_pipelined: int

    _flow: _Flow
    _held = b""  # read, but not parsed yet
    _body_left = 0  # bytes that a Content-Length announces and that are not parsed yet
    _broken = False  # what came is no HTTP; the requests before it get their answers, and that is all

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From asyncio: a client has connected."""
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._cycles: dict[RequestResponseCycle, int] = {}  # requests without a complete answer -> bytes of the header

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio: nothing more will come, and what was held back needs no answer."""
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """From asyncio: bytes, perhaps of several requests."""
        if self._broken:
            return
        if self._flow.full:
            self._held += data
        else:
            self.parse(data)

    def parse(self, data: bytes) -> None:
        """Parse piece by piece, each so small that the requests in it cannot be too many; keep what there is no room for. What a
        Content-Length announces is one piece, however many lines it has."""
        at = 0
        while at < len(data) and not self._broken and not self.transport.is_closing():
            room = self.max_pipelined + 1 - len(self._cycles)
            if room <= 0 or sum(self._cycles.values()) > self.max_bytes:
                self._held = data[at:]
                self._flow.full = True
                self._flow.pause_reading()
                return
            end = max(_end_of_lines(data, at, LINES * room), at + BYTES * room, at + self._body_left)
            super().data_received(data[at:end])
            at = end

    def on_headers_complete(self) -> None:
        """Parser callback: the request starts to run, or waits for the one before it."""
        super().on_headers_complete()
        if self._offers:
            return
        self._forget_answered()
        self._cycles[self.cycle] = self._header_bytes
        self._body_left = int(dict(self.headers).get(b"content-length", 0))  # the parser has checked it

    def on_body(self, body: bytes) -> None:
        """Parser callback: a piece of the body."""
        super().on_body(body)
        self._body_left -= len(body)

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete."""
        super().on_message_complete()
        self._body_left = 0

    def _send_error(self, error: APIError, phrase: bytes) -> None:
        """Answer without the application, and close. Answers come in the order of the requests: while earlier ones wait for theirs,
        the connection closes behind the last of these, and the error is not told."""
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if ahead := [cycle for cycle in waiting if not (cycle is self.cycle and cycle.more_body)]:
            self._broken = True
            ahead[-1].keep_alive = False
        elif waiting and waiting[0].response_started:
            self.transport.close()
        else:
            super()._send_error(error, phrase)

    def on_response_complete(self) -> None:
        """From uvicorn: the whole answer was handed to the transport; the next request runs."""
        super().on_response_complete()
        self._forget_answered()
        if self._flow.full and len(self._cycles) <= (self.max_pipelined + 1) // 2:
            # Not now: parsing may end the connection, and an answer is being sent.
            self.loop.call_soon(self._parse_held)

    def _forget_answered(self) -> None:
        """Answers come in the order of the requests."""
        for cycle in list(self._cycles):
            if not cycle.response_complete:
                break
            del self._cycles[cycle]

    def _parse_held(self) -> None:
        if self._flow.full and not self.transport.is_closing():
            data, self._held, self._flow.full = self._held, b"", False
            self._flow.resume_reading()
            self.parse(data)


def _end_of_lines(data: bytes, at: int, count: int) -> int:
    """Where the next so many lines end; the end of the data if there are fewer."""
    for _ in range(count):
        at = data.find(b"\n", at) + 1
        if at == 0:
            return len(data)
    return at
