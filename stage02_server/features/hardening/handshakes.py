"""TLS for connections that count from their first byte (uvicorn: the event loop does the handshake, and tells nobody of it).

A client that connects and never completes the handshake holds an open file. In the event loop it has a minute, and no limit sees
it: as many of these as there are files, and nobody else can connect. So asyncio's own TLS protocol stands between the connection
and HTTP here, where it is counted, gives way when there are too many, and has the time that a header has.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import create_ssl_context

from stage02_server.features.hardening.manifest import HardeningFlags
from stage02_server.features.hardening.open_connections import OpenConnections
from stage02_server.features.hardening.slow_clients import TimedHttpProtocol


class Handshake(asyncio.sslproto.SSLProtocol):  # type: ignore[name-defined]
    """The TLS of one connection.

    Invariant: until its handshake is complete it is one of the open connections, and idle: beyond `--max-connections` the one that has
    waited longest is closed. After that the HTTP protocol counts.
    """

    def __init__(self, context: ssl.SSLContext, seconds: float, http: type[TimedHttpProtocol], **uvicorn: Any) -> None:
        self._opened: OpenConnections = http.opened
        secured = _secured(http)(**uvicorn)
        secured.handshake = self
        loop = asyncio.get_running_loop()
        limits = {"ssl_handshake_timeout": seconds or None, "ssl_shutdown_timeout": seconds or None}
        super().__init__(loop, secured, context, None, server_side=True, **limits)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """From the event loop: a client has connected, and nothing was read yet."""
        self._raw = transport
        if not self._opened.add(self):
            transport.abort()  # it expects TLS, and could not read an answer
            return
        self._opened.rest(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """From the event loop: it has closed."""
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """It is no longer a connection without a protocol above it."""
        self._opened.discard(self)

    def end_idle(self) -> None:
        """Another client needs the place."""
        self._raw.abort()


def _secured(http: type[TimedHttpProtocol]) -> type[Any]:
    """HTTP over a connection whose handshake has been counted."""

    class Secured(http):  # type: ignore[valid-type, misc]
        handshake: Handshake

        def connection_made(self, transport: asyncio.Transport) -> None:
            self.handshake.leave()
            super().connection_made(transport)

    return Secured


def with_tls(http: type[TimedHttpProtocol], args: HardeningFlags) -> Callable[..., asyncio.BaseProtocol]:
    """What makes a protocol of each connection for uvicorn."""
    assert args.ssl_certfile is not None
    context = create_ssl_context(
        args.ssl_certfile, args.ssl_keyfile, None, ssl.PROTOCOL_TLS_SERVER, args.ssl_cert_reqs, args.ssl_ca_certs,
        args.ssl_ciphers or "TLSv1",  # uvicorn's default: OpenSSL's name for a set, not a version of TLS
    )  # fmt: skip
    return partial(Handshake, context, args.request_header_timeout, http)
