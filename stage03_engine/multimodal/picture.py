"""From a decoded picture to what the vision tower sees (transformers' image processors, up to where bytes become numbers). Needs Pillow."""

from __future__ import annotations

import struct

from PIL import Image, ImageOps

from stage03_engine.multimodal.registry import ProcessingInfo
from stage03_engine.params.multimodal import Picture

BROKEN = (OSError, ValueError, SyntaxError, TypeError, EOFError, IndexError, KeyError, struct.error)
"""What Pillow raises for a file that is broken; some of it only when its pixels are asked for."""


def picture_of(image: Image.Image, info: ProcessingInfo) -> Picture:
    """What a picture is to the engine. Raises what is in BROKEN."""
    if not image.width or not image.height:
        raise ValueError("it has no pixels")
    image.load()  # of an animation the first picture
    fitted = info.fitted(_rgb(ImageOps.exif_transpose(image)))
    return Picture.of(fitted.tobytes(), fitted.size, image.size)


def _rgb(image: Image.Image) -> Image.Image:
    """What is transparent becomes white, as in vLLM."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA", "PA"):
        over = image.convert("RGBA")
        image = Image.new("RGB", image.size, (255, 255, 255))
        image.paste(over, mask=over.getchannel("A"))
    return image.convert("RGB")
