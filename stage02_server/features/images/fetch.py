"""Pictures from other servers (vllm/multimodal/media/connector.py, vllm/connections.py).

A client says which address to ask, so it could have the server ask what only the server can reach. Therefore: only hosts that the operator
names; only if every address of the host is public; the connection goes to the address that was looked at, whatever the name means a
moment later; no redirects; so many bytes and seconds, and no more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import weakref
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

import httpx

from stage02_server.features.images.decode import refused
from stage03_engine.errors import InvalidRequestError

AT_ONCE = 8  # of all clients; of each client one
_UNICAST = ipaddress.ip_network("2000::/3")  # all public IPv6: other ranges are reserved, and some wrap an IPv4 address


def is_public(address: str) -> bool:
    """False for loopback, private, link-local, shared and reserved addresses, and for those that only wrap another one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.sixtofour is not None or ip.teredo is not None or ip not in _UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


class MediaFetcher:
    """Asks other servers for files."""

    def __init__(self, domains: Collection[str], seconds: float, max_bytes: int) -> None:
        self._domains = {domain.lower().rstrip(".") for domain in domains}
        self._seconds, self._max_bytes = seconds, max_bytes
        self._places = asyncio.Semaphore(AT_ONCE)
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def fetch(self, url: str, client: str) -> bytes:
        """The file. Raises InvalidRequestError. The time begins with the turn of the client."""
        host = self._checked(url)
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Lock()
        async with turn, self._places:
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._fetch(url, host)
            except InvalidRequestError:  # or it would count as a ValueError
                raise
            except TimeoutError:
                raise self._failed(f"it took longer than {self._seconds} seconds (--media-fetch-seconds)") from None
            except httpx.InvalidURL:  # no HTTPError; httpx knows more rules than urlsplit
                raise refused("has an address that is not a URL") from None
            except (httpx.HTTPError, OSError, ValueError):
                raise self._failed("its server does not answer") from None

    def _checked(self, url: str) -> SplitResult:
        try:
            found = urlsplit(url)
            host, _ = (found.hostname or "").lower().rstrip("."), found.port
        except ValueError:
            raise refused("has an address that is not a URL") from None
        if found.scheme not in ("http", "https"):
            raise refused("must be a data: URL, or an address that begins with http://, https:// or file:///")
        if not self._domains:
            raise refused("must come as a data: URL: this server fetches none (see --allowed-media-domains)")
        if host not in self._domains or "@" in found.netloc:
            raise refused(f"must come from one of {', '.join(sorted(self._domains))} (--allowed-media-domains)")
        return found

    def _failed(self, why: str) -> InvalidRequestError:
        return refused(f"cannot be fetched: {why}")

    async def _fetch(self, url: str, parts: SplitResult) -> bytes:
        host = parts.hostname or ""
        address = await self._address_of(host, parts.port or (443 if parts.scheme == "https" else 80))
        # The address in the URL is what is connected to; the name goes into the header, and into the check of the certificate.
        target = httpx.URL(url).copy_with(host=address)
        headers = {
            "Host": parts.netloc,
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "User-Agent": "vllm-in-stages",
        }
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._seconds) as client,
            client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            if answer.has_redirect_location:
                raise self._failed("its server redirects, which is not followed")
            if answer.status_code != 200:
                raise self._failed(f"its server says {answer.status_code}")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise self._failed("its server compresses it")
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise refused(f"has more than {self._max_bytes} bytes (--max-image-bytes)")
            return bytes(data)

    async def _address_of(self, host: str, port: int) -> str:
        """One of the host's, all of which are public."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(map(is_public, addresses)):
            raise self._failed("its host has an address that is not public")
        return addresses[0]
