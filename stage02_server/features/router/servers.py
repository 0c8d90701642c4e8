"""The servers behind the router: which are up, how busy each is, and who gets the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from stagetrace import trace

logger = logging.getLogger(__name__)
HEALTH_SECONDS = 2.0  # a server that takes longer to answer /health is not ready
CONNECT_SECONDS = 2.0
AGAIN_SECONDS = 1.0


class Server:
    """One server. `busy` counts what it is doing for this router."""

    def __init__(self, role: str, url: str) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.is_up: bool | None = None  # None: nobody has asked yet
        self.busy = self.served = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A request is there."""
        self.busy, self.served = self.busy + 1, self.served + 1
        try:
            yield
        finally:
            self.busy -= 1


class Servers:
    """All of them. It connects only to their addresses, and follows neither redirects nor proxies of the environment."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], timeout: float) -> None:
        self.prefill, self.decode = (
            [Server("prefill", url) for url in prefill],
            [Server("decode", url) for url in decode],
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for each look
        # A connection for each request. On one that is used again, whatever a server sent beyond its answer would be the answer to somebody else's request,
        # and a server that closes it just then would seem to have died of the next one.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeouts = httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # one client's belong in no other's request
        self.client = httpx.AsyncClient(
            limits=limits, timeout=timeouts, trust_env=False, follow_redirects=False, cookies=no_cookies
        )

    @property
    def all(self) -> list[Server]:
        """Of both kinds."""
        return [*self.prefill, *self.decode]

    def choose(self, role: str, but: Collection[Server] = ()) -> Server | None:
        """The least busy server of this kind that is up; of equally busy ones, the one that was asked least."""
        up = [server for server in getattr(self, role) if server.is_up and server not in but]
        return min(up, key=lambda server: (server.busy, server.served), default=None)

    def for_answer(self, but: Collection[Server] = ()) -> Server | None:
        """Who answers: a decode server or, if none is up, a prefill server, which can do everything."""
        if any(server.is_up for server in self.decode):
            return self.choose("decode", but)
        return self.choose("prefill", but)

    async def look(self, server: Server) -> None:
        """Is it up?"""
        try:
            async with (
                asyncio.timeout(HEALTH_SECONDS),  # one that says a byte now and then would be waited for without end
                self.client.stream("GET", server.url + "/health", timeout=HEALTH_SECONDS) as answer,
            ):
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            self._found(server, False, reason(error))
        else:
            self._found(server, status == 200, f"its /health says {status}")

    def _found(self, server: Server, is_up: bool, why: str) -> None:
        if server.is_up is is_up:
            return
        server.is_up = is_up
        if is_up:
            logger.info("The %s server %s is ready.", server.role, server.url)
        else:
            logger.warning(
                "The %s server %s is not ready, and gets no requests until it is: %s.", server.role, server.url, why
            )
        if trace.on:
            trace.emit("router.server", role=server.role, url=server.url, is_up=is_up, message="" if is_up else why)

    async def watch(self, seconds: float) -> None:
        """Poll all of them; more often while one is not up, as it may be loading its model."""
        while True:
            await asyncio.sleep(seconds if all(server.is_up for server in self.all) else min(seconds, AGAIN_SECONDS))
            await asyncio.gather(*map(self.look, self.all))


def reason(error: Exception) -> str:
    """In a few words."""
    if isinstance(error, httpx.ConnectError):
        return f"it cannot be reached ({error})"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "it does not answer in time"
    return f"the connection broke ({type(error).__name__})"
