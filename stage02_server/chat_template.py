"""Messages in, one prompt out (vllm/renderers/chat_utils/chat_message.py).

GPT-2 has no chat template: its prompt is the contents of the messages, joined into one text. (vLLM
refuses to chat with such a model.) A template, from `--chat-template`, the model or the request, is rendered by a feature.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import CONTENT_KINDS, ChatMessageParam, ChatTemplateFields, ContentPart
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.plugins import find, wanted

logger = logging.getLogger(__name__)
_PLAIN_FIELDS = {"role", "content", "name"}  # of a message; only templates use the others


class Renderer(Protocol):
    """The feature that renders templates."""

    async def render(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> str:
        """The prompt. Raises as `ChatTemplate.apply` does."""


class ChatTemplate:
    """Makes prompts. Raises ConfigError for a template that cannot be read or rendered."""

    def __init__(self, args: FrontendArgs, tokenizer: Tokenizer) -> None:
        self._args, self._tokenizer = args, tokenizer
        self._jinja: Renderer | None = None  # once there is a template or a request has fields for one
        self._has_template = bool(args.chat_template or tokenizer.chat_template)
        if self._has_template:
            self._jinja = wanted("server", "chat_template", "the feature that renders chat templates")(args, tokenizer)
        else:
            logger.info("The model has no chat template: chats become the plain concatenation of their messages.")

    def _load(self) -> Renderer:
        if self._jinja is None:
            if (kind := find("server", "chat_template")) is None:
                raise InvalidRequestError("Chat templates belong to a feature that is not installed.", "messages")
            self._jinja = kind(self._args, self._tokenizer)
        return self._jinja

    async def apply(self, messages: list[ChatMessageParam], fields: ChatTemplateFields | None = None) -> str:
        """The prompt. Raises InvalidRequestError if none can be made from the messages, APIError if too many others wait."""
        fields = fields or ChatTemplateFields()
        if not messages:
            raise InvalidRequestError("messages must hold at least one message.", "messages")
        plain = await asyncio.to_thread(self._plain, messages, fields)  # there may be thousands of messages
        return await self._load().render(messages, fields) if plain is None else plain

    def _plain(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> str | None:
        more = any(message.model_fields_set - _PLAIN_FIELDS or message.model_extra for message in messages)
        is_plain = not (self._jinja or more or any(feature.for_templates for feature in fields.used_features()))
        return "".join(map(text_of, messages)) if is_plain else None

    def adds_special_tokens(self, asked: bool | None) -> bool:
        """Should the tokenizer add the model's beginning-of-text token? As the request says; else only without a
        template, since templates write that token themselves."""
        return not self._has_template if asked is None else asked


def text_of(message: ChatMessageParam) -> str:
    """The content of a message as one text: parts are joined by line breaks, as in vLLM."""
    return "\n".join(text_parts(message))


def text_parts(message: ChatMessageParam) -> list[str]:
    """Raises InvalidRequestError for a part of a kind that nobody has declared, or without what its kind needs."""
    content = message.content or ""
    return [_part_text(part) for part in content] if isinstance(content, list) else [content]


def _part_text(part: ContentPart | str) -> str:
    if isinstance(part, str):
        return part
    which = f"A content part of type {part.type[:50]!r}"
    if (kind := CONTENT_KINDS.get(part.type)) is None:
        raise InvalidRequestError(
            f"{which} cannot be served; there are {', '.join(sorted(CONTENT_KINDS))}.", "messages"
        )
    if (text := kind.as_text(part)) is None:
        raise InvalidRequestError(f"{which} lacks its field {next(iter(kind.model_fields))!r}.", "messages")
    return text
