"""What one connection may have the server keep: an incomplete request, and requests that wait (vLLM: the header's limits only).

The parser that uvicorn uses has no limit to a header. uvicorn also parses all that it reads and queues every request: a client that
reads nothing could hand over requests without end, and thousands of them came in one piece, which the event loop parsed while
all other clients waited. So it did with a body in chunks of one byte: what takes time is what the parser calls, not bytes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
import time

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stage02_server.errors import APIError, error_json
from stage02_server.features.hardening.connection_turns import ParsingTurns, Start, StartingTurns
from stage02_server.features.hardening.turns import ADDRESS

UPGRADE = b"upgrade"
LINES = 2  # the fewest of a request: the request line and an empty one
BYTES = 18  # and the fewest bytes: GET / HTTP/1.1, and two line ends
MOST_REQUESTS = 8  # in a piece that is parsed at once: a quarter of a millisecond
LINGER_SECONDS = 0.5  # what a refused client still sends is read and dropped for so long, as in Go's net/http


class _HeaderLimitError(Exception):
    """Raised in a parser callback to stop the parser."""


class _TunnelError(Exception):
    """Raised in a parser callback: what follows is not HTTP, and would go to somebody else."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a limit to what it keeps while it waits: the number of header fields (trailers too), their
    bytes, and the bytes since anything was complete. Beyond, the answer is a 431 and the connection ends.

    A request that offers another protocol (Java's client offers HTTP/2 with each) is answered as if it did not, as the standard
    says. The parser takes all behind its header, also its body, for that protocol: so another parser gets the header again, once,
    without the offer, and then the rest. (The first one would drop it all if the connection ends with this request.) CONNECT asks
    for a tunnel, and is refused: 400.

    A client that is refused may still be sending. Closing at once would reset its connection, and it would never see why; so what
    comes is dropped for a moment first.

    Invariants: between two calls of `data_received` the parser holds at most `max_bytes` bytes of something incomplete, and
    what the last call brought. Each round of the loop over what is left behind an offer begins with less than the one before.
    """

    max_bytes: int
    max_headers: int
    _num_headers = 0
    _header_bytes = 0
    _incomplete = 0  # bytes since the header, a piece of the body, or the request was complete
    _offers = False  # another protocol
    _repeats = False  # the header that made the offer, without it
    _tunnel = False  # asked for
    _refused = False  # an error was the last answer
    _rest: int | None = None  # where in what is being parsed the header with the offer ends

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
        self._offers = self.parser.should_upgrade()
        self._tunnel = self.parser.get_method() == b"CONNECT"
        if self._tunnel or (self._offers and self._repeats):
            raise _TunnelError
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
        self._rest = error.args[0]

    def _without_offer(self) -> bytes:
        """The header that made the offer."""
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        head += [b"%s: %s" % header for header in self.headers if header[0] != UPGRADE]
        return b"\r\n".join([*head, b"", b""])

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        if self._refused:
            return
        self._incomplete += len(data)
        while data:
            self._rest = None
            super().data_received(data)
            if self._rest is None:
                break
            assert self._rest > 0, "an offer ends behind the byte that completes its header"
            data = data[self._rest :]
            header = self._without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self._repeats = True
            super().data_received(header)
            self._repeats = False
            if self._refused or self.transport.is_closing():
                return
        if self._incomplete > self.max_bytes and not self._refused and not self.transport.is_closing():
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: 431 if a limit stopped it, else 400. The same error object as everywhere."""
        if self._num_headers > self.max_headers or max(self._header_bytes, self._incomplete) > self.max_bytes:
            text = (
                f"The header may have at most {self.max_headers} fields (--h11-max-header-count) and {self.max_bytes} bytes "
                "(--h11-max-incomplete-event-size)."
            )
            error, phrase = APIError(431, "BadRequestError", text), b"431 Request Header Fields Too Large"
        elif self._tunnel:
            error = APIError(400, "Bad Request", "This server is no proxy: it takes no CONNECT.")
            phrase = b"400 Bad Request"
        else:
            error, phrase = APIError(400, "Bad Request", "This is not HTTP/1.1."), b"400 Bad Request"
        self._send_error(error, phrase, linger=True)

    def _send_error(self, error: APIError, phrase: bytes, linger: bool = False) -> None:
        """Answer without the application, and close: in a moment if the client may still be sending."""
        body = error_json(error).encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (phrase, len(body)) + body)
        if linger:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what its handler says goes nowhere
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


class _Flow(FlowControl):
    """uvicorn's flow control. It resumes reading after every answer, and whenever a handler waits for its client; `full` forbids it."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


def network_of(host: str) -> str:
    """What is one address for a limit: an IPv4 address, or the /64 that a customer of an IPv6 network has."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]  # a proxy may name anything
    mapped = address if address.version == 4 else address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))


class PipelinedHttpProtocol(LimitedHttpProtocol):
    """HTTP/1.1 in which at most `max_pipelined` requests of a connection wait behind the one that is being answered, with headers of
    at most `max_bytes` together. What lies behind them is not parsed, and nothing more is read, until half of them have
    their answers: the client's own sending then comes to a halt, as TCP provides, and no request is refused. It comes to a halt as
    well while parsing has had its time (`ParsingTurns`), or while all requests that its address may have in flight are (`StartingTurns`).

    Invariant: nothing is held back unless the connection is full, and then nothing is read.
    """

    max_pipelined: int
    turns: ParsingTurns
    starts: StartingTurns
    # paths that need no place: a proxy whose clients take them all is still told that the server is well
    placeless: frozenset[str]

    _flow: _Flow
    _held = b""  # read, but not parsed yet
    _ahead = False  # it is full because of requests that wait, not because others have their turn
    _body_left = 0  # bytes that a Content-Length announces and that are not parsed yet
    _start: Start | None = None  # the latest request, which may wait to begin
    _network: str | None = None  # whence the connection comes, once it is needed
    _broken = False  # what came is no HTTP; the requests before it get their answers, and that is all

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From asyncio: a client has connected."""
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._cycles: dict[RequestResponseCycle, int] = {}  # requests without a complete answer -> bytes of the header

    def connection_lost(self, exc: Exception | None) -> None:
        """From asyncio: nothing more will come, and what was held back needs no answer."""
        self._held = b""
        self.turns.leave(self)
        if self._start is not None:
            self.starts.withdraw(self._start)
        self.pipeline.clear()  # nothing of it begins, and each request in it knows this object: no work for the garbage collector
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
        """Parse piece by piece, each so small that the requests in it cannot be too many, nor take long; keep what there is no room
        or no time for. What a Content-Length announces is one piece, however many lines it has: it is one call of the parser."""
        at = 0
        while at < len(data) and not (self._broken or self._refused or self.transport.is_closing()):
            room = min(self.max_pipelined + 1 - len(self._cycles), MOST_REQUESTS)
            self._ahead = room <= 0 or sum(self._cycles.values()) > self.max_bytes
            if self._ahead or self.turns.is_over(first=at == 0):
                self._hold(data[at:])
                return
            end = max(_end_of_lines(data, at, LINES * room), at + BYTES * room, at + self._body_left)
            began = time.perf_counter()
            super().data_received(data[at:end])
            self.turns.spent(time.perf_counter() - began)
            at = end

    def _hold(self, data: bytes) -> None:
        self._held, self._flow.full = data, True
        self._flow.pause_reading()
        if not self._ahead:
            self.turns.join(self)

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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """From uvicorn: the application is to answer."""
        address, path = self._address(cycle), cycle.scope["path"]
        begin = super()._start_asgi_task
        start = Start(address, bool(address) and path not in self.placeless, lambda: begin(cycle, counted))

        async def counted(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            ADDRESS.set(address)  # in the task of this request
            try:
                await app(scope, receive, send)
            finally:
                self.starts.end(start)

        self._start = start
        self.starts.add(start)

    def _address(self, cycle: RequestResponseCycle) -> str:
        """Whence the request comes: behind a proxy that --forwarded-allow-ips names, the client's address. A Unix socket has none."""
        if isinstance(proxied := self.config.loaded_app, ProxyHeadersMiddleware):
            hosts = proxied.trusted_hosts
            forwarded = b",".join(value for name, value in cycle.scope["headers"] if name == b"x-forwarded-for")
            if forwarded and (self.client[0] if self.client else "") in hosts:
                return network_of(hosts.get_trusted_client_address(forwarded[-1024:].decode("latin-1"))[0])
        if self._network is None:
            self._network = network_of(self.client[0]) if self.client else ""
        return self._network

    def _send_error(self, error: APIError, phrase: bytes, linger: bool = False) -> None:
        """Answer without the application, and end the connection. Answers come in the order of the requests: while earlier ones wait
        for theirs, the connection closes behind the last of these, and the error is not told."""
        waiting = [cycle for cycle in self._cycles if not cycle.response_complete]
        if ahead := [cycle for cycle in waiting if not (cycle is self.cycle and cycle.more_body)]:
            self._broken = True
            ahead[-1].keep_alive = False
        elif waiting and waiting[0].response_started:
            self.transport.close()
        else:
            super()._send_error(error, phrase, linger)

    def on_response_complete(self) -> None:
        """From uvicorn: the whole answer was handed to the transport; the next request runs."""
        super().on_response_complete()
        self._forget_answered()
        if self._flow.full and len(self._cycles) <= (self.max_pipelined + 1) // 2:
            self.turns.join(self)  # not now: parsing may end the connection, and an answer is being sent

    def _forget_answered(self) -> None:
        """Answers come in the order of the requests."""
        while self._cycles and (first := next(iter(self._cycles))).response_complete:
            del self._cycles[first]

    def parse_held(self) -> None:
        """From the turns: there is time, and room or at least an answer more."""
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
