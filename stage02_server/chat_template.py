"""Messages in, one prompt out (vllm/entrypoints/chat_utils.py).

A template comes from `--chat-template`, else from the model. GPT-2 has none: its prompt is the contents of the messages,
one after the other, as if they were one text. (vLLM refuses to chat with such a model.)
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.template_renderer import TemplateRenderer
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields, ContentPart, MessageToolCall
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_TEMPLATE_CHARACTERS = 65_536  # of a template that comes with a request
_OURS = frozenset(
    ("messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "return_tensors", "return_dict", "raise_exception", "strftime_now")
)  # fmt: skip
"""Variables of a template that chat_template_kwargs cannot replace, and words that mean something to transformers."""


def load_chat_template(given: str | None) -> str | None:
    """The text of `--chat-template`, which is a file or the template itself. Raises ConfigError for an unreadable file."""
    if given is None or "{" in given or "\n" in given:  # no file has a name like this
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"cannot read the chat template {given!r} ({reason}); see --chat-template") from error


class ChatTemplate:
    """Renders messages, in a sandbox and with limits: template_process.py says why."""

    def __init__(self, args: FrontendArgs, tokenizer: Tokenizer) -> None:
        source = load_chat_template(args.chat_template) or tokenizer.chat_template
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._has_template, self._trusting = source is not None, args.trust_request_chat_template
        self._defaults = args.default_chat_template_kwargs or {}
        if wrong := _OURS & self._defaults.keys():
            raise ConfigError(f"--default-chat-template-kwargs must not hold {min(wrong)}: the server sets it")
        self._renderer = TemplateRenderer(source)
        asked = args.chat_template_content_format
        self._format = self._renderer.content_format if asked == "auto" else asked
        if source is None:
            logger.info("The model has no chat template: chats become the plain concatenation of their messages.")

    def apply(self, messages: list[ChatMessageParam], fields: ChatTemplateFields | None = None) -> str:
        """The prompt. Waits for the process that renders: call it in a thread. Raises InvalidRequestError when the messages
        or the template do not allow one."""
        fields = fields or ChatTemplateFields()
        self._check(messages, fields)
        templated = self._has_template or fields.chat_template is not None
        plain = [plain_message(message, self._format if templated else "string") for message in messages]
        if not templated:
            return "".join(message["content"] for message in plain)
        try:
            prompt = self._renderer.render(fields.chat_template, self._variables(plain, fields))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"The chat template does not take these messages: {error}", "messages") from None
        return _cut_after(prompt, messages[-1], plain[-1]) if fields.continue_final_message else prompt

    def _check(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> None:
        if not messages:
            raise InvalidRequestError("messages must hold at least one message.", "messages")
        if fields.chat_template is not None:
            if not self._trusting:
                raise InvalidRequestError(
                    "This server takes no chat template from requests; --trust-request-chat-template lets it.",
                    "chat_template",
                )
            if not 0 < len(fields.chat_template) <= MAX_TEMPLATE_CHARACTERS:
                raise InvalidRequestError(
                    f"chat_template must have 1 to {MAX_TEMPLATE_CHARACTERS} characters.", "chat_template"
                )
        if wrong := _OURS & (fields.chat_template_kwargs or {}).keys():
            raise InvalidRequestError(f"chat_template_kwargs must not hold {min(wrong)}.", "chat_template_kwargs")
        if fields.continue_final_message and fields.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt=false: the answer goes on with the last message, or "
                "begins a new one.",
                "continue_final_message",
            )

    def _variables(self, plain: list[dict[str, Any]], fields: ChatTemplateFields) -> dict[str, Any]:
        """What the template sees. `tools` and `documents` are always there: templates ask `tools is not none`."""
        effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
        variables = self._defaults | effort | (fields.chat_template_kwargs or {}) | self._tokens
        variables |= {"messages": plain, "documents": fields.documents, "tools": None}
        variables["add_generation_prompt"] = fields.add_generation_prompt is not False
        variables["continue_final_message"] = bool(fields.continue_final_message)
        if fields.tools:
            variables["tools"] = [
                {"type": tool.type, "function": tool.function.model_dump(exclude_unset=True)} for tool in fields.tools
            ]
        return variables

    def adds_special_tokens(self, asked: bool | None) -> bool:
        """Should the tokenizer begin the prompt with the model's beginning-of-text token? What the request asks for, else
        only where there is no template: templates write that token themselves."""
        return not self._has_template if asked is None else asked


def _cut_after(prompt: str, message: ChatMessageParam, plain: dict[str, Any]) -> str:
    """The prompt up to the end of the last message's text, so that the model goes on with it. A template may strip it."""
    content = plain["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    for wanted in (text, text.rstrip(), text.strip()):
        if wanted.strip() and (place := prompt.rfind(wanted)) >= 0:
            return prompt[: place + len(wanted)]
    raise InvalidRequestError(
        f"continue_final_message: the prompt does not hold the last message's text (role {message.role[:50]!r}).",
        "messages",
    )


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
