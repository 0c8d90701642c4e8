"""Images in `LLM.chat` (vllm/renderers/chat_utils/item_tracker.py, the parts image_url and image_pil)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stage02_server.features.images.decoder import ImageDecoder
from stage02_server.features.images.loader import ImageLoader
from stage02_server.features.images.parts import images_of
from stage02_server.protocol import ChatMessageParam, ContentPart
from stage03_engine.frontend.features.image_inputs import check_count
from stage03_engine.frontend.features.image_prompts import as_picture
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY, ProcessingInfo
from stage03_engine.params.multimodal import Picture

if TYPE_CHECKING:
    from stage03_engine.llm import LLM

_decoders: WeakKeyDictionary[LLM, ImageDecoder] = WeakKeyDictionary()
"""Kept for the next chats: each has a process once it has decoded a file."""


class OfflineImages:
    """The images of the chats of one call, without a server. A text-only model loads none: its chat refuses them when it makes the prompt."""

    def __init__(self, llm: LLM) -> None:
        self._llm, shape = llm, llm.vllm_config.shape
        self._info: ProcessingInfo | None = None if shape.image_token is None else MULTIMODAL_REGISTRY.info(shape)
        self._loader: ImageLoader | None = None

    def with_pillow_images(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages, in which {"type": "image_pil", "image_pil": image} is a part that is loaded. Raises InvalidRequestError."""
        return [
            message | {"content": [self._ready(part) for part in message["content"]]}
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _ready(self, part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "image_pil":
            return part
        ready = ContentPart.model_validate({"type": "image_url", "image_url": ""})
        if self._info is not None:
            ready.loaded(as_picture(part.get("image_pil"), self._info, "image_pil"), self._info.placeholder)
        return ready

    async def load(self, messages: list[ChatMessageParam]) -> list[Picture]:
        """All images of a chat, in order; those of files by the rules of the server. Raises InvalidRequestError."""
        if self._info is None:
            return []
        parts = images_of(messages)
        check_count(len(parts), self._llm.vllm_config, "messages")
        for part in parts:
            if not part.is_loaded:
                picture, _ = await self._loader_of_files().load(part.url or "", "")
                part.loaded(picture, self._info.placeholder)
        return [part.picture for part in parts]

    def _loader_of_files(self) -> ImageLoader:
        """Made for this call, because each call has its own event loop."""
        if self._loader is None:
            self._loader = ImageLoader(self._llm.vllm_config, _decoders.get(self._llm))
            _decoders[self._llm] = self._loader.decoder
        return self._loader
