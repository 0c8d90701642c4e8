"""Chat templates in Jinja: from `--chat-template`, the model, or the request (vllm/entrypoints/chat_utils.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.chat_template.messages import plain_message
from stage02_server.features.chat_template.renderer import TemplateRenderer
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer

MAX_TEMPLATE_CHARACTERS = 65_536  # of a template that comes with a request
_RESERVED = frozenset(
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


class JinjaChatTemplate:
    """Renders messages, in a sandbox and with limits: process.py says why."""

    def __init__(self, args: FrontendArgs, tokenizer: Tokenizer) -> None:
        source = load_chat_template(args.chat_template) or tokenizer.chat_template
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._has_template, self._trusts = source is not None, args.trust_request_chat_template
        self._defaults = args.default_chat_template_kwargs or {}
        if wrong := _RESERVED & self._defaults.keys():
            raise ConfigError(f"--default-chat-template-kwargs must not hold {min(wrong)}: the server sets it")
        self._renderer = TemplateRenderer(source)
        asked = args.chat_template_content_format
        self._format = self._renderer.content_format if asked == "auto" else asked

    def render(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> str | None:
        """The prompt; None without a template. Raises InvalidRequestError if none can be made from them."""
        self._check(fields)
        templated = self._has_template or fields.chat_template is not None
        plain = [plain_message(message, self._format if templated else "string") for message in messages]
        if not templated:
            return None
        try:
            prompt = self._renderer.render(fields.chat_template, self._variables(plain, fields))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"The chat template does not take these messages: {error}", "messages") from None
        return _cut_after(prompt, messages[-1], plain[-1]) if fields.continue_final_message else prompt

    def _check(self, fields: ChatTemplateFields) -> None:
        if fields.continue_final_message and fields.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt=false: the answer goes on with the last message, or "
                "begins a new one.",
                "continue_final_message",
            )
        if fields.chat_template is not None:
            if not self._trusts:
                raise InvalidRequestError(
                    "This server takes no chat template from requests; --trust-request-chat-template lets it.",
                    "chat_template",
                )
            if not 0 < len(fields.chat_template) <= MAX_TEMPLATE_CHARACTERS:
                raise InvalidRequestError(
                    f"chat_template must have 1 to {MAX_TEMPLATE_CHARACTERS} characters.", "chat_template"
                )
        if wrong := _RESERVED & (fields.chat_template_kwargs or {}).keys():
            raise InvalidRequestError(f"chat_template_kwargs must not hold {min(wrong)}.", "chat_template_kwargs")

    def _variables(self, plain: list[dict[str, Any]], fields: ChatTemplateFields) -> dict[str, Any]:
        """What the template sees. `tools` and `documents` are always there: templates ask `tools is not none`."""
        effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
        variables = self._defaults | effort | (fields.chat_template_kwargs or {}) | self._tokens
        variables |= {"messages": plain, "documents": fields.documents, "tools": None}
        variables["add_generation_prompt"] = fields.add_generation_prompt is not False
        variables["continue_final_message"] = bool(fields.continue_final_message)
        if tools := getattr(fields, "tools", None):
            variables["tools"] = [
                {"type": tool.type, "function": tool.function.model_dump(exclude_unset=True)} for tool in tools
            ]
        return variables


def _cut_after(prompt: str, message: ChatMessageParam, plain: dict[str, Any]) -> str:
    """The prompt up to the end of the last message's text, so that the model continues it. A template may strip it."""
    content = plain["content"]
    text = content if isinstance(content, str) else content[-1]["text"]
    for wanted in (text, text.rstrip(), text.strip()):
        if wanted.strip() and (place := prompt.rfind(wanted)) >= 0:
            return prompt[: place + len(wanted)]
    raise InvalidRequestError(
        f"continue_final_message: the prompt does not hold the last message's text (role {message.role[:50]!r}).",
        "messages",
    )
