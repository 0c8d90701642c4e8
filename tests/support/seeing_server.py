"""Servers of any model that sees, without an engine, and the pictures that they get."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

from pictures_elsewhere import server_of
from PIL import Image
from server_under_test import InProcessServer
from small_llava import encoded, picture

from stage03_engine.config import VllmConfig


def seeing_servers(config: VllmConfig, **always: Any) -> Iterator[Callable[..., InProcessServer]]:
    """What a fixture yields: it makes servers, which end with the test."""
    with ExitStack() as servers:
        yield lambda **args: servers.enter_context(closing(server_of(config, **always, **args)))


def data_url(shown: bytes | int | Image.Image, kind: str = "png") -> str:
    """Of a file, of the picture with this number, or of any."""
    shown = picture(shown) if isinstance(shown, int) else shown
    data = shown if isinstance(shown, bytes) else encoded(shown)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(shown: bytes | int | Image.Image, **fields: Any) -> dict[str, Any]:
    """A part of a message of a chat."""
    return {"type": "image_url", "image_url": {"url": data_url(shown), **fields}}
