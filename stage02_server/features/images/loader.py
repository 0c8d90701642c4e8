"""From the address of a picture to its pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stage02_server.features.images.decode import refused
from stage02_server.features.images.decoder import CPU_SECONDS, ImageDecoder
from stage02_server.features.images.process import Settings
from stage03_engine.config import VllmConfig
from stage03_engine.params.multimodal import Picture

if TYPE_CHECKING:
    from stage02_server.cli_args import FrontendArgs
    from stage02_server.features.images.fetch import MediaFetcher


class ImageLoader:
    """What comes with the request is decoded, what it names is fetched first."""

    def __init__(self, args: FrontendArgs, config: VllmConfig) -> None:
        self._args, most = args, config.max_model_len - 1  # a prompt leaves room for an answer
        settings = Settings(args.max_image_bytes, args.max_image_pixels, most, CPU_SECONDS, config.shape)
        self._decoder = ImageDecoder(settings)
        self._fetcher: MediaFetcher | None = None

    async def load(self, url: str, client: str) -> tuple[Picture, bool]:
        """(the picture, whether another server had it). Raises InvalidRequestError."""
        if url[:5].lower() == "data:":
            return await self._decoder.decode(_base64_of(url)), False
        if self._fetcher is None:
            from stage02_server.features.images.fetch import MediaFetcher

            args = self._args
            self._fetcher = MediaFetcher(
                args.allowed_media_domains or (), args.media_fetch_seconds, args.max_image_bytes
            )
        return await self._decoder.decode(await self._fetcher.fetch(url, client)), True


def _base64_of(url: str) -> str:
    """What stands behind the comma of `data:image/png;base64,`."""
    head, comma, text = url.partition(",")
    head = head[5:].lower()
    if not comma or not head.endswith(";base64") or not head.startswith("image/"):
        raise refused("has a data: URL that does not begin like data:image/png;base64,")
    return text
