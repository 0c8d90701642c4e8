"""The prompt of a chat, for the APIs that turn their requests into one."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from stage02_server.chat_template import ChatTemplate
from stage02_server.middleware import RequestIds
from stage02_server.protocol import ChatCompletionRequest
from stage02_server.streaming import run_until_disconnect
from stagetrace import trace


async def prompt_of(
    chat: ChatCompletionRequest, template: ChatTemplate, parsers: Any, receive: Receive, ids: RequestIds | None = None
) -> str:
    """The messages as one text; `parsers` may hide the tools from the template. Raises InvalidRequestError, APIError and
    ClientGoneError."""
    shown = chat if parsers is None else parsers.shown_to_template(chat)
    prompt = await run_until_disconnect(receive, template.apply(chat.messages, shown))
    if trace.on and ids is not None:
        count = len(chat.messages)
        trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
    return prompt
