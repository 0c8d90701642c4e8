"""The pictures that servers of models that see get."""

from __future__ import annotations

import base64
from typing import Any

from PIL import Image
from small_llava import encoded, picture


def data_url(shown: bytes | int | Image.Image, kind: str = "png") -> str:
    """Of a file, of the picture with this number, or of any."""
    shown = picture(shown) if isinstance(shown, int) else shown
    data = shown if isinstance(shown, bytes) else encoded(shown)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(shown: bytes | int | Image.Image, **fields: Any) -> dict[str, Any]:
    """A part of a message of a chat."""
    return {"type": "image_url", "image_url": {"url": data_url(shown), **fields}}
