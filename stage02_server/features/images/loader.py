"""From the address of a picture to its pixels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from stage02_server.features.images.decode import refused
from stage02_server.features.images.decoder import CPU_SECONDS, ImageDecoder
from stage02_server.features.images.files import LocalFiles
from stage02_server.features.images.process import Settings
from stage03_engine.config import VllmConfig
from stage03_engine.params.multimodal import Picture

if TYPE_CHECKING:
    from stage02_server.features.images.fetch import MediaFetcher


class ImageLoader:
    """Decodes the pictures that come with a request; those that it only names are read or fetched first. `decoder` shares an existing one."""

    def __init__(self, config: VllmConfig, decoder: ImageDecoder | None = None) -> None:
        self._media = media = config.multimodal_config
        most = config.max_model_len - 1  # a prompt leaves room for an answer
        settings = Settings(media.max_image_bytes, media.max_image_pixels, most, CPU_SECONDS, config.shape)
        self.decoder = decoder or ImageDecoder(settings)
        self._files = LocalFiles(media.allowed_local_media_path, media.max_image_bytes)
        self._fetcher: MediaFetcher | None = None

    async def load(self, url: str, client: str) -> tuple[Picture, bool]:
        """(the picture, whether another server had it). Raises InvalidRequestError."""
        if url[:5].lower() == "data:":
            return await self.decoder.decode(_base64_of(url)), False
        if url[:5].lower() == "file:":
            return await self.decoder.decode(partial(self._files.read, url)), False
        if self._fetcher is None:
            from stage02_server.features.images.fetch import MediaFetcher

            media = self._media
            self._fetcher = MediaFetcher(
                media.allowed_media_domains or (), media.media_fetch_seconds, media.max_image_bytes
            )
        return await self.decoder.decode(await self._fetcher.fetch(url, client)), True


def _base64_of(url: str) -> str:
    """What stands behind the comma of `data:image/png;base64,`."""
    head, comma, text = url.partition(",")
    head = head[5:].lower()
    if not comma or not head.endswith(";base64") or not head.startswith("image/"):
        raise refused("has a data: URL that does not begin like data:image/png;base64,")
    return text
