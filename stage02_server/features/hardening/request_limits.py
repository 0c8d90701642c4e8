"""Limits on the size of a request, before anything parses it (vLLM: only the limits of the header).

The body: `BodyLimitMiddleware`, and once it is parsed `BoundedBody` in fields.py. The header: `LimitedHttpProtocol`, as the
parser that uvicorn uses has no limit of its own.
"""

from __future__ import annotations

import codecs

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stage02_server.errors import APIError, error_json, error_response
from stage02_server.features.hardening.flags import HardeningFlags

MAX_FIELDS = (
    1024  # of a query, a form, and the cookies: splitting a million of them takes a second and blocks all others
)
MULTIPART_BYTES = 32 * 1024**2  # an uploaded file is not parsed as JSON, which is what makes a large body expensive

URL_ENCODED = "application/x-www-form-urlencoded"
COMPRESSIONS = {"gzip", "x-gzip", "deflate", "compress", "br", "zstd"}  # a small body that becomes a large one

BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


class ItemCounter:
    """Counts the commas, the opening brackets and the colons of JSON: items, and keys once more. Those within texts do not count.
    Linear.

    Invariant: `_in_text` says whether a text is open behind all that was counted; `_held` is a backslash there whose second half is
    still to come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._in_text = False
        self._held = b""
        self._head = b""  # the first four bytes: they tell how the rest is encoded

    def add(self, piece: bytes) -> int:
        """Count the next piece as well; returns the number so far."""
        if len(self._head) < 4:
            self._head = (self._head + piece)[:4]
        if b"\0" in self._head or self._head.startswith(BYTE_ORDER_MARKS):
            self.count += _items(
                piece
            )  # UTF-16 or UTF-32: a quote may be half a character, so those in texts count too
        else:
            self.count += _items(b"".join(self._outside(piece)))
        return self.count

    def _outside(self, piece: bytes) -> list[bytes]:
        """What is not within a text."""
        piece = (self._held + piece).replace(rb"\\", b"")  # pairs, so that what is left escapes what follows
        self._held = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = parts[self._in_text :: 2]
        self._in_text ^= len(parts) % 2 == 0
        return outside


def _items(piece: bytes) -> int:
    return piece.count(b",") + piece.count(b"[") + piece.count(b"{") + piece.count(b":")


class BodyLimitMiddleware:
    """413 for a body that is too long: at once if its header says so, else when a limit is passed. 400 for a query of too many
    parts, and 431 for too many cookies."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app, self._max_bytes, self._max_items = app, args.max_request_bytes, args.max_request_items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (wrong := _fields_refused(scope, headers)) is not None:
            await error_response(scope, wrong)(scope, receive, send)
            return
        content_type = headers.get("content-type", "").lower()
        is_upload, is_form = content_type.startswith("multipart/form-data"), content_type.startswith(URL_ENCODED)
        limit = max(self._max_bytes, MULTIPART_BYTES) if is_upload else self._max_bytes
        # While it reads a body, FastAPI passes on an HTTPException and turns everything else into a 400.
        refusal = HTTPException(413, f"The body may have at most {limit} bytes.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > limit:
            await error_response(scope, refusal)(scope, receive, send)
            return
        if COMPRESSIONS & {word.strip() for word in headers.get("content-encoding", "").lower().split(",")}:
            packed = APIError(415, "BadRequestError", "The body must not be compressed: leave Content-Encoding out.")
            await error_response(scope, packed)(scope, receive, send)
            return
        taken, separators, items = 0, 0, ItemCounter()

        async def receive_within_limit() -> Message:
            nonlocal taken, separators
            message = await receive()
            body = message.get("body", b"")
            taken += len(body)
            if taken > limit:
                raise refusal
            separators += body.count(b"&") if is_form else 0
            if separators >= MAX_FIELDS:
                raise HTTPException(413, f"A form may have at most {MAX_FIELDS} fields.")
            if not is_upload and items.add(body) > self._max_items:
                raise HTTPException(413, f"The body may hold at most {self._max_items} items (--max-request-items).")
            return message

        await self._app(scope, receive_within_limit, send)


def _fields_refused(scope: Scope, headers: Headers) -> APIError | None:
    """What the framework would split on the event loop, whether the route needs it or not."""
    if scope.get("query_string", b"").count(b"&") >= MAX_FIELDS:
        return APIError(400, "Bad Request", f"The query may have at most {MAX_FIELDS} parts.")
    if sum(cookies.count(";") for cookies in headers.getlist("cookie")) >= MAX_FIELDS:
        return APIError(431, "Bad Request", f"There may be at most {MAX_FIELDS} cookies.")
    return None


class _HeaderLimitError(Exception):
    """Raised in a parser callback to stop the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a limit to what it keeps while it waits: the number of header fields (trailers too), their
    bytes, and the bytes since anything was complete. Beyond, the answer is a 431 and the connection ends.

    Invariant: between two calls of `data_received` the parser holds at most `max_bytes` bytes of something incomplete, and
    what the last call brought.
    """

    max_bytes: int
    max_headers: int
    _num_headers = 0
    _header_bytes = 0
    _incomplete = 0  # bytes since the header, a piece of the body, or the request was complete

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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Parser callback: a piece of the body."""
        self._incomplete = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete."""
        self._incomplete = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes from the socket."""
        self._incomplete += len(data)
        super().data_received(data)
        if self._incomplete > self.max_bytes and not self.transport.is_closing():
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: 431 if a limit stopped it, else 400. The same error object as everywhere."""
        if self._num_headers > self.max_headers or max(self._header_bytes, self._incomplete) > self.max_bytes:
            text = f"The header may have at most {self.max_headers} fields and {self.max_bytes} bytes."
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
