"""Messages in, one prompt out (vllm/entrypoints/chat_utils.py).

GPT-2 has no chat template: its prompt is the contents of the messages, one after the other, as if they were one text. (vLLM
refuses to chat with such a model.) A template, from `--chat-template`, the model or the request, is rendered by a feature.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields, ContentPart, MessageToolCall
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer
from stage03_engine.mixins import is_there, load

logger = logging.getLogger(__name__)
JINJA = "stage02_server.features.chat_template.jinja"

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part -> the field that holds its text."""
_NOT_BUILT = ("audio", "function_call", "task", "tools")
"""Fields of a message that no template here would see."""


class ChatTemplate:
    """Makes prompts. Raises ConfigError for a template that cannot be read or rendered."""

    def __init__(self, args: FrontendArgs, tokenizer: Tokenizer) -> None:
        self._args, self._tokenizer = args, tokenizer
        self._jinja: Any = None  # the feature, once there is a template or a request has fields for one
        self._has_template = bool(args.chat_template or tokenizer.chat_template)
        if self._has_template:
            self._load()
        else:
            logger.info("The model has no chat template: chats become the plain concatenation of their messages.")

    def _load(self) -> None:
        if self._jinja is None:
            if not is_there(JINJA):
                raise ConfigError("chat templates belong to the feature chat_template, which is not installed")
            self._jinja = load(f"{JINJA}:JinjaChatTemplate")(self._args, self._tokenizer)

    def apply(self, messages: list[ChatMessageParam], fields: ChatTemplateFields | None = None) -> str:
        """The prompt. A template is rendered in another process, which takes a while: call this in a thread. Raises
        InvalidRequestError if the messages or the template do not allow a prompt."""
        fields = fields or ChatTemplateFields()
        if not messages:
            raise InvalidRequestError("messages must hold at least one message.", "messages")
        if fields.continue_final_message and fields.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt=false: the answer goes on with the last message, or "
                "begins a new one.",
                "continue_final_message",
            )
        if any(feature.for_templates for feature in fields.used_features()):
            self._load()
        prompt: str | None = None if self._jinja is None else self._jinja.render(messages, fields)
        if prompt is None:
            prompt = "".join(plain_message(message, "string")["content"] for message in messages)
        return prompt

    def adds_special_tokens(self, asked: bool | None) -> bool:
        """Should the tokenizer begin the prompt with the model's beginning-of-text token? What the request asks for, else
        only where there is no template: templates write that token themselves."""
        return not self._has_template if asked is None else asked


def plain_message(message: ChatMessageParam, content_format: str) -> dict[str, Any]:
    """A message as a template sees it: fields that the client left out are not there, but `content` always is.

    With `content_format` "string" the content is one text (parts are joined by line breaks, as in vLLM), with "openai" a list
    of {"type": "text", "text": ...}. Reasoning has both its names, as templates know one or the other. Raises
    InvalidRequestError for a part that is no text, and a field that would be lost.
    """
    for name in _NOT_BUILT:
        if (message.model_extra or {}).get(name):
            raise InvalidRequestError(f"{name} in a message is not supported by this server; leave it out.", "messages")
    content = message.content or ""
    parts = [_part_text(part) for part in content] if isinstance(content, list) else [content]
    plain: dict[str, Any] = {"role": message.role, "content": "\n".join(parts)}
    if content_format == "openai":
        plain["content"] = [{"type": "text", "text": text} for text in parts]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _part_text(part: ContentPart | str) -> str:
    if isinstance(part, str):
        return part
    text = getattr(part, _TEXT_FIELDS[part.type]) if part.type in _TEXT_FIELDS else None
    if text is None:
        raise InvalidRequestError(
            f"Only text can be served, not a content part of type {part.type[:50]!r}.", "messages"
        )
    return text


def _plain_call(call: MessageToolCall) -> dict[str, Any]:
    """Clients send the arguments as JSON in a text; templates write them as JSON themselves, and need the value."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError("The arguments of a tool call must be a JSON object in a text.", "messages")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})
