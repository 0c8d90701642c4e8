"""Pictures of chats. What bounds each, and says where it may come from, is set with the model (stage03_engine/multimodal/manifest.py)."""

from __future__ import annotations

from dataclasses import dataclass

from stage03_engine.args.fields import option
from stage03_engine.plugins import Feature, Part


@dataclass(frozen=True)
class ImageFlags:
    """How much all clients' pictures may take."""

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
