"""Which parts of a chat are pictures."""

from __future__ import annotations

from collections.abc import Sequence

from stage02_server.protocol import ChatMessageParam, ContentPart


def images_of(messages: Sequence[ChatMessageParam]) -> list[ContentPart]:
    """In their order."""
    lists = (message.content for message in messages if isinstance(message.content, list))
    parts = (part for parts in lists for part in parts if not isinstance(part, str))
    return [part for part in parts if part.type == "image_url" and part.url is not None]
