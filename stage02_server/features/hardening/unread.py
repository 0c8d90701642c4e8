"""What clients leave unread: long answers go out in pieces, and what waits has a limit per key. (vLLM hands every answer over
whole: uvicorn keeps the bytes until the client has read them.)

A piece follows when the client has read those before it. So a slow reader holds the answer's own bytes, which all readers of a stored
response share, and at most two pieces in its connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.middleware import CONNECTION, TENANT
from stagetrace import trace

PIECE = 65536  # bytes; as many may wait in a connection before uvicorn waits as well
SPARE = 256  # addresses that may be kept before they are looked through


class Connection(TypedDict, total=False):
    """What slow_clients.py tells of a connection; empty without one."""

    abort: Callable[[], None]  # ends it at once
    waiting: Callable[[], int]  # bytes that were handed over and that the client has not read
    transport: asyncio.Transport  # asyncio's own


@dataclass(eq=False)
class Reader:
    """A connection, and the answer of which a part is not handed over yet."""

    connection: Connection
    body: bytes = b""

    @property
    def waiting(self) -> int:
        """Bytes in the connection."""
        return self.connection["waiting"]() if "waiting" in self.connection else 0

    def cut(self) -> None:
        """End the connection."""
        if "abort" in self.connection:
            self.connection["abort"]()


@dataclass(eq=False)
class Unread:
    """The readers of one key's answers, those first that have read nothing for the longest time.

    Beyond the limit the first of them is cut: a client that reads along is never the first for long. The answer that grows stays, so
    that a single one may have any size. Bytes that several readers share count once. What has been read since it was counted is noticed only
    beyond the limit, and looked for after an eighth of it: so much may be unread besides.
    """

    max_bytes: int
    readers: dict[int, Reader] = field(default_factory=dict)  # by the identity of the connection
    _most: int = 0  # bytes that may be unread

    def grow(self, reader: Reader) -> None:
        """A new body for this reader, or more in its connection; make room."""
        self.progress(reader)
        self._most += len(reader.body) + reader.waiting
        if self._most > self.max_bytes + self.max_bytes // 8:
            self._make_room(reader)

    def progress(self, reader: Reader) -> None:
        """It has been handed over more: now it is the last one to be cut."""
        self.readers.pop(id(reader.connection), None)
        self.readers[id(reader.connection)] = reader

    def forget_read(self) -> bool:
        """Forget those that have read everything; true if there is no other."""
        self.readers = {name: reader for name, reader in self.readers.items() if reader.body or reader.waiting}
        return not self.readers

    def _make_room(self, newest: Reader) -> None:
        self.forget_read()
        sharers = Counter(id(reader.body) for reader in self.readers.values())
        bodies = {id(reader.body): len(reader.body) for reader in self.readers.values()}
        self._most = sum(bodies.values()) + sum(reader.waiting for reader in self.readers.values())
        for name, reader in list(self.readers.items()):
            if self._most <= self.max_bytes or reader is newest:
                break
            del self.readers[name]
            sharers[id(reader.body)] -= 1
            self._most -= reader.waiting + (0 if sharers[id(reader.body)] else len(reader.body))
            if trace.on:
                trace.emit("connection.ended", reason="too much unread")
            reader.cut()


class UnreadMiddleware:
    """Outermost, so that no answer gets past it."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app, self._max_bytes = app, args.max_unread_bytes
        self.keys: dict[int | str, Unread] = {}  # key, or address of a client without one -> what it has not read
        self._room = SPARE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Pieces(self, scope, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.stop()
        if answer.left:  # the end of the server came in the middle; uvicorn would take the silence for a mistake
            answer.reader.cut()
            await asyncio.sleep(0)

    def of(self, scope: Scope) -> Unread:
        """The one of the asking key, or else of the address."""
        client = scope.get("client")
        tenant = TENANT.get()
        key: int | str = tenant if tenant is not None else client[0] if client else ""
        if key not in self.keys:
            if len(self.keys) >= self._room:
                self.keys = {key: unread for key, unread in self.keys.items() if not unread.forget_read()}
                self._room = 2 * len(self.keys) + SPARE
            self.keys[key] = Unread(self._max_bytes)
        return self.keys[key]


class _Pieces:
    """One answer on its way to uvicorn. Short ones, and a stream's short events, go as they are."""

    def __init__(self, middleware: UnreadMiddleware, scope: Scope, send: Send) -> None:
        self._middleware, self._scope, self._send = middleware, scope, send
        self.reader = Reader(scope.get("extensions", {}).get(CONNECTION, {}))
        self.left = b""  # of a body whose sending was cancelled

    async def send(self, message: Message) -> None:
        """Returns when everything but the last piece has been read, or at once when there is little."""
        body: bytes = message.get("body", b"")
        if self.left or len(body) > PIECE:
            await self._send_long(self.left + body if self.left else body, message.get("more_body", False))
        else:
            await self._send(message)
            if self.reader.waiting:
                self._middleware.of(self._scope).grow(self.reader)

    async def _send_long(self, body: bytes, more_body: bool) -> None:
        """Everybody else has a turn between two pieces. What is cancelled in the middle goes on with the next message: half an event
        would spoil the stream."""
        unread = self._middleware.of(self._scope)
        self.reader.body = body
        unread.grow(self.reader)
        at = 0  # uvicorn waits before it hands a piece over, never after: what is cancelled was not
        try:
            while at < len(body):
                piece = body[at : at + PIECE]
                more = more_body or at + len(piece) < len(body)
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
                at += len(piece)
                if at < len(body):
                    unread.progress(self.reader)
                    await asyncio.sleep(0)
        finally:
            self.reader.body, self.left = b"", body[at:]

    def stop(self) -> None:
        """Nothing more will be handed over."""
        self.reader.body = b""
