"""The flags that bound pictures, and say where they may come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class ImageFlags:
    """How many pictures, how large, and from where."""

    limit_mm_per_prompt: dict[str, Any] | None = option(
        None, 'most images of one prompt (400 beyond), as JSON: {"image": 4}; 8 if not given'
    )
    allowed_media_domains: tuple[str, ...] | None = option(
        None,
        "hosts whose images are fetched, if a chat names their addresses, which must be public; none if not given: then images come as data: URLs",
    )
    media_fetch_seconds: int = option(5, "most seconds that an image may take to be fetched (400 beyond)", at_least=1)
    max_image_bytes: int = option(8388608, "most bytes of an image's file (400 beyond)", at_least=1)
    max_image_pixels: int = option(
        33554432, "most pixels of an image, width x height, by what its file says (400 beyond)", at_least=1
    )
    max_held_image_bytes: int = option(
        268435456,
        "most bytes of decoded images that all unfinished requests may hold together (429 beyond)",
        at_least=1,
    )


FEATURE = Feature(
    name="images",
    help="images in chats, for models that see",
    room=__package__,
    settings={"FrontendArgs": ImageFlags},
    parts=(
        Part("content", ".fields:ImagePart", key="image_url"),
        Part("routes", ".serving:install", tasks=("image",)),
        Part("server", ".offline:OfflineImages", key="offline_images"),
    ),
    needs=("multimodal", "chat_template", "held_bytes", "child_process"),
    events=("image.loaded",),
)
