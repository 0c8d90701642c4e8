"""Messages as chat templates see them (vllm/renderers/chat_utils/chat_message.py, parse_chat_messages)."""

from __future__ import annotations

import json
from typing import Any

from stage02_server.chat_template import text_parts
from stage02_server.protocol import ChatMessageParam, MessageToolCall
from stage03_engine.errors import InvalidRequestError

_NOT_BUILT = ("audio", "function_call", "task", "tools")
"""Fields of a message that no template here would see."""


def plain_message(message: ChatMessageParam, content_format: str) -> dict[str, Any]:
    """A message as a template sees it: fields that the client left out are not there, but `content` always is.

    With `content_format` "string" the content is one text (parts are joined by line breaks, as in vLLM), with "openai" a list
    of {"type": "text", "text": ...}, in which an image is {"type": "image"}. Reasoning has both its names, as templates know one or the other. Raises
    InvalidRequestError for a part that cannot be served, and a field that would be lost.
    """
    for name in _NOT_BUILT:
        if (message.model_extra or {}).get(name):
            raise InvalidRequestError(f"{name} in a message is not supported by this server; leave it out.", "messages")
    parts = text_parts(message)
    plain: dict[str, Any] = {"role": message.role, "content": "\n".join(parts)}
    if content_format == "openai":
        plain["content"] = [_seen(kind, text) for kind, text in zip(_kinds(message), parts, strict=True)]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _kinds(message: ChatMessageParam) -> list[str]:
    content = message.content
    return [getattr(part, "type", "text") for part in content] if isinstance(content, list) else ["text"]


def _seen(kind: str, text: str) -> dict[str, str]:
    """A template writes the token of an image itself."""
    return {"type": "image"} if kind == "image_url" else {"type": "text", "text": text}


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
