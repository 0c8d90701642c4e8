"""The prompt of a chat, for the APIs that turn their requests into one."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from stage02_server.chat_template import ChatTemplate
from stage02_server.middleware import RequestIds
from stage02_server.protocol import ChatCompletionRequest, SamplingRequest
from stage02_server.serving_engine import EngineRequests, OpenAIServing
from stage02_server.streaming import run_until_disconnect
from stage03_engine.sampling_params import SamplingParams
from stagetrace import trace


async def prompt_of(
    chat: ChatCompletionRequest,
    template: ChatTemplate,
    parsers: Any,
    raw_request: Request,
    ids: RequestIds | None = None,
) -> str:
    """The messages as one text, once their images are there; `parsers` may hide the tools from the template. Raises InvalidRequestError,
    APIError and ClientGoneError."""
    if (images := images_in(raw_request)) is not None:
        await images.load(chat, raw_request)
    shown = chat if parsers is None else parsers.shown_to_template(chat)
    prompt = await run_until_disconnect(raw_request.receive, template.apply(chat.messages, shown))
    if trace.on and ids is not None:
        count = len(chat.messages)
        trace.emit("request.templated", req=ids.engine_id(0), messages=count, characters=len(prompt))
    return prompt


def images_in(raw_request: Request) -> Any:
    """The feature that has images in chats; None where the model takes text alone."""
    return getattr(raw_request.app.state, "images", None)


async def tokenized(
    serving: OpenAIServing, request: SamplingRequest, chat: ChatCompletionRequest, prompt: str, params: SamplingParams,
    model: str, special: bool, raw_request: Request,
) -> EngineRequests:  # fmt: skip
    """As `OpenAIServing.tokenize`, with the images of the chat that the request has become."""
    ids, prompts, receive = raw_request.state.ids, list[str | list[int]]([prompt]), raw_request.receive
    if (images := images_in(raw_request)) is not None:
        made: EngineRequests = await images.tokenize(request, prompts, params, ids, model, receive, special, chat=chat)
        return made
    return await serving.tokenize(request, prompts, params, ids, model, receive, special)
