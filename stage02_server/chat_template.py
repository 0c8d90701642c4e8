"""Messages in, one prompt out (vllm/entrypoints/chat_utils.py).

A template comes from `--chat-template`, else from the model. GPT-2 has none: its prompt is the contents of the messages,
one after the other, as if they were one text. (vLLM refuses to chat with such a model.)
"""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stage02_server.protocol import ChatMessageParam
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def load_chat_template(given: str | None) -> str | None:
    """The text of `--chat-template`, which is a file or the template itself. Raises ConfigError for an unreadable file."""
    if given is None or "{" in given or "\n" in given:  # no file has a name like this
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"cannot read the chat template {given!r} ({reason}); see --chat-template") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """Renders messages. The template runs in a sandbox: a model's files are data from elsewhere, not code to trust."""

    def __init__(self, given: str | None, tokenizer: Tokenizer) -> None:
        source = load_chat_template(given) or tokenizer.chat_template
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._template = None
        if source is None:
            logger.info("The model has no chat template: chats become the plain concatenation of their messages.")
            return
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}; see --chat-template") from error

    def apply(self, messages: list[ChatMessageParam]) -> str:
        """The prompt. Raises InvalidRequestError when the messages or the template do not allow one."""
        if not messages:
            raise InvalidRequestError("messages must hold at least one message.", "messages")
        plain = [_plain(message) for message in messages]
        if self._template is None:
            return "".join(message["content"] for message in plain)
        try:
            # Templates ask `tools is not none`, as transformers always names these two.
            rest = {"tools": None, "documents": None, **self._tokens}
            return self._template.render(messages=plain, add_generation_prompt=True, **rest)
        except Exception as error:  # a template may do anything that Python can, e.g. divide by zero
            raise InvalidRequestError(f"The chat template does not take these messages: {error}", "messages") from error

    def adds_special_tokens(self, asked: bool | None) -> bool:
        """Should the tokenizer begin the prompt with the model's beginning-of-text token? What the request asks for, else
        only where there is no template: templates write that token themselves."""
        return self._template is None if asked is None else asked


def _plain(message: ChatMessageParam) -> dict[str, Any]:
    """A message as templates expect it: its content is one string (text parts are joined by line breaks, as in vLLM)."""
    if (message.model_extra or {}).get("tool_calls"):
        raise InvalidRequestError("tool_calls in messages are not supported by this server.", "messages")
    content = message.content or ""
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise InvalidRequestError(
                    f"Only text can be served, not a content part of type {part.type!r}.", "messages"
                )
        content = "\n".join(part.text or "" for part in content)
    return {"role": message.role, "content": content} | ({} if message.name is None else {"name": message.name})
