"""A server of a model that sees, without an engine: what it would have been asked is remembered."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from pictures_elsewhere import apart
from PIL import Image
from server_under_test import InProcessServer, RecordingEcho
from small_llava import encoded, picture

from stage03_engine.config import VllmConfig


class Seen(RecordingEcho):
    """Remembers the requests of the engine."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config=config)
        self.requests: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.requests.append(request)
        await super().add_request_async(request)


def seeing_servers(config: VllmConfig, **always: Any) -> Iterator[Callable[..., InProcessServer]]:
    """What a fixture yields: it makes servers, which end with the test."""
    servers: list[InProcessServer] = []

    def make(**args: Any) -> InProcessServer:
        rest, mine = apart(args, config)
        servers.append(InProcessServer(Seen(mine), mine, **always, **rest))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def data_url(shown: bytes | int | Image.Image, kind: str = "png") -> str:
    """Of a file, of the picture with this number, or of any."""
    shown = picture(shown) if isinstance(shown, int) else shown
    data = shown if isinstance(shown, bytes) else encoded(shown)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(shown: bytes | int | Image.Image, **fields: Any) -> dict[str, Any]:
    """A part of a message of a chat."""
    return {"type": "image_url", "image_url": {"url": data_url(shown), **fields}}
