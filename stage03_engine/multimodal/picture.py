"""From a decoded picture to what the vision tower sees (transformers' CLIPImageProcessor, up to where bytes become numbers). Needs Pillow."""

from __future__ import annotations

import struct

from PIL import Image, ImageOps

from stage03_engine.multimodal.shape_fields import ImageProcessorConfig
from stage03_engine.params.multimodal import Picture

BROKEN = (OSError, ValueError, SyntaxError, TypeError, EOFError, IndexError, KeyError, struct.error)
"""What Pillow raises for a file that is broken; some of it only when its pixels are asked for."""


def pixels_of(image: Image.Image, settings: ImageProcessorConfig) -> bytes:
    """[height, width, 3], a byte each. Raises what is in BROKEN."""
    image.load()  # of an animation the first picture
    return _fitted(_rgb(ImageOps.exif_transpose(image)), settings).tobytes()


def picture_of(image: Image.Image, settings: ImageProcessorConfig) -> Picture:
    """What a caller's picture is to the engine. Raises what is in BROKEN."""
    if not image.width or not image.height:
        raise ValueError("it has no pixels")
    return Picture.of(pixels_of(image, settings), *image.size)


def resized_size(width: int, height: int, settings: ImageProcessorConfig) -> tuple[int, int]:
    """(width, height). One number is the length of the shorter side; the other one keeps the proportions."""
    if settings.resize is None:
        return width, height
    if isinstance(settings.resize, tuple):
        return settings.resize[1], settings.resize[0]
    short = settings.resize
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def _rgb(image: Image.Image) -> Image.Image:
    """What is transparent becomes white, as in vLLM."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA", "PA"):
        over = image.convert("RGBA")
        image = Image.new("RGB", image.size, (255, 255, 255))
        image.paste(over, mask=over.getchannel("A"))
    return image.convert("RGB")


def _fitted(image: Image.Image, settings: ImageProcessorConfig) -> Image.Image:
    """Resized, and the middle of it."""
    size = resized_size(*image.size, settings)
    if settings.resize is not None:
        image = image.resize(size, Image.Resampling(settings.resample))
    if settings.crop is None:
        return image
    high, wide = settings.crop
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    return image.crop((left, top, left + wide, top + high))  # black where the picture is smaller
