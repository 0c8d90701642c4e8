"""From a picture's file to what the vision tower sees (vllm/multimodal/media/image.py).

Pillow decodes; what a file says about its size is held against the limit before anything is decoded. Runs in a process of its own
(process.py).
"""

from __future__ import annotations

import base64
import binascii
import io

from PIL import Image, UnidentifiedImageError

from stage03_engine.errors import InvalidRequestError
from stage03_engine.multimodal.picture import BROKEN, picture_of
from stage03_engine.multimodal.registry import ProcessingInfo
from stage03_engine.params.multimodal import Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
Image.MAX_IMAGE_PIXELS = None  # the limit here is ours


def prepared(data: bytes | str, max_bytes: int, max_pixels: int, max_tokens: int, info: ProcessingInfo) -> Picture:
    """What the tower sees. Text is base64. Raises InvalidRequestError."""
    if isinstance(data, str):
        data = _plain(data, max_bytes)
    if len(data) > max_bytes:
        raise refused(f"has {len(data)} bytes; at most {max_bytes} (--max-image-bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, max_pixels, max_tokens, info)
            return picture_of(image, info)
    except InvalidRequestError:  # or it would count as a ValueError
        raise
    except UnidentifiedImageError:
        raise refused(f"is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except BROKEN:
        raise refused("is broken, and cannot be decoded") from None


def refused(why: str) -> InvalidRequestError:
    """A refusal of an image."""
    return InvalidRequestError(f"image_url: the image {why}.", "messages")


def _plain(text: str, max_bytes: int) -> bytes:
    if len(text) // 4 * 3 > max_bytes + 2:
        raise refused(f"has about {len(text) // 4 * 3} bytes; at most {max_bytes} (--max-image-bytes)")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refused("is not valid base64") from None


def _check_size(width: int, height: int, max_pixels: int, max_tokens: int, info: ProcessingInfo) -> None:
    """Check its size, and the one that it is resized to before it is cropped: a long thin picture would grow, and a large one fill the context."""
    if not width or not height:
        raise refused("has no pixels")
    if width * height > max_pixels:
        raise refused(f"has {width} x {height} pixels; at most {max_pixels} (--max-image-pixels)")
    try:
        wide, high = info.resized_size(width, height)
    except ValueError as error:
        raise refused(f"of {width} x {height} pixels {error}") from None
    if wide * high > max_pixels:
        raise refused(f"of {width} x {height} pixels would be resized to {wide} x {high}; at most {max_pixels} pixels")
    if (tokens := info.num_tokens(wide, high)) > max_tokens:
        raise refused(
            f"of {width} x {height} pixels takes {tokens} tokens of the prompt; at most {max_tokens} (--max-model-len)"
        )
