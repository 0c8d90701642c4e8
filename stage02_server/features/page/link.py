"""The last line of a start: where a browser finds the server."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)
EVERYWHERE = ("0.0.0.0", "::")  # addresses to listen on, which no browser can open


def say_where(address: str) -> None:
    """Log the link to the page, if the server has an address for browsers."""
    if link := link_to(address):
        logger.info("Open %s", link)


def link_to(address: str) -> str | None:
    """`http://0.0.0.0:8000` -> `http://localhost:8000/`; None for a Unix socket."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https"):
        return None
    here = parts.hostname in EVERYWHERE or parts.hostname == "127.0.0.1"
    return f"{parts.scheme}://localhost:{parts.port}/" if here else f"{address}/"
