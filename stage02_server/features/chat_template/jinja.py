"""Chat templates in Jinja: from `--chat-template`, the model, or the request (vllm/renderers/hf.py)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stage02_server.chat_template import text_of
from stage02_server.cli_args import FrontendArgs
from stage02_server.errors import RETRY_AFTER_SECONDS, APIError
from stage02_server.features.chat_template.messages import plain_message
from stage02_server.features.chat_template.renderer import TemplateRenderer
from stage02_server.middleware import TENANT
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.tokenizer import Tokenizer

MAX_TEMPLATE_CHARACTERS = 65_536  # of a template that comes with a request
LONG_CHAT = 65_536  # characters of its JSON; templates take some milliseconds for so many
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
    """Renders messages, in a sandbox and with limits: process.py says why.

    There are three processes, so that chats wait only for chats of their kind: for short chats, for long chats, and for templates that
    come with requests, which are strangers' programs. These also never see the chats of others.
    """

    def __init__(self, args: FrontendArgs, tokenizer: Tokenizer) -> None:
        source = load_chat_template(args.chat_template) or tokenizer.chat_template
        self._tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._has_template, self._trusts = source is not None, args.trust_request_chat_template
        self._defaults = args.default_chat_template_kwargs or {}
        if wrong := _RESERVED & self._defaults.keys():
            raise ConfigError(f"--default-chat-template-kwargs must not hold {min(wrong)}: the server sets it")
        self._of_short, self._of_long = TemplateRenderer(source), TemplateRenderer(source)
        self._of_requests, self._num_of_requests = TemplateRenderer(None), Counter[int | None]()
        self._most_of_requests = args.max_request_templates
        if source is not None:
            self._of_short.start()
        asked = args.chat_template_content_format
        self._format = self._of_short.content_format if asked == "auto" else asked

    async def render(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> str:
        """The prompt; without a template the contents of the messages. Raises InvalidRequestError if none can be made from
        them, APIError 429 if too many requests with templates wait."""
        self._check(fields)
        with self._counted(fields.chat_template):
            variables = await asyncio.to_thread(self._variables, messages, fields)
            if variables is None:
                return await asyncio.to_thread("".join, map(text_of, messages))
            renderer = self._of_short if len(variables) <= LONG_CHAT else self._of_long
            if fields.chat_template is not None:
                renderer = self._of_requests
            try:
                return await renderer.render(fields.chat_template, variables)
            except InvalidRequestError as error:
                raise _refused(error) from None

    @contextmanager
    def _counted(self, template: str | None) -> Iterator[None]:
        """Raises APIError 429 for a request with a template while too many others of its API key wait or are rendered."""
        if template is None:
            yield
            return
        count, key = self._num_of_requests, TENANT.get()
        if count[key] >= self._most_of_requests:
            full = f"{count[key]}, which is the limit (--max-request-templates)"
            message = f"Requests with a chat template of their own that wait already: {full}. Try again later."
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise APIError(429, "RateLimitError", message, "chat_template", headers)
        count[key] += 1
        try:
            yield
        finally:
            count[key] -= 1

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

    def _variables(self, messages: list[ChatMessageParam], fields: ChatTemplateFields) -> str | None:
        """What the template sees, as JSON, since MessagePack has no large integers; None without a template. Checks the messages
        in any case. Takes long for many: call it in a thread. Raises InvalidRequestError."""
        templated = self._has_template or fields.chat_template is not None
        plain = [plain_message(message, self._format if templated else "string") for message in messages]
        if not templated:
            return None
        try:
            text = json.dumps(self._seen(plain, fields), ensure_ascii=False)
            text.encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise _refused(f"they cannot be encoded: {type(error).__name__}") from None
        return text

    def _seen(self, plain: list[dict[str, Any]], fields: ChatTemplateFields) -> dict[str, Any]:
        """The variables. `tools` and `documents` are always there: templates ask `tools is not none`."""
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


def _refused(reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"The chat template does not take these messages: {reason}", "messages")
