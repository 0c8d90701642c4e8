"""The routes of Anthropic's Messages API (vllm/entrypoints/anthropic/api_router.py)."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Message, Receive, Scope, Send

from stage02_server.api_server import Services
from stage02_server.errors import unavailable
from stage02_server.features.messages.errors import error_event
from stage02_server.features.messages.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from stage02_server.features.messages.serving import AnthropicServingMessages
from stage02_server.streaming import EventStreamResponse, answer_of

router = APIRouter()


class MessageStreamResponse(EventStreamResponse):
    """A stream that the server's end cuts ends with an error in Anthropic's shape, not in OpenAI's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await super().__call__(scope, receive, noted)
        except asyncio.CancelledError:
            if begun and scope["app"].state.gate.expired:
                last = error_event(unavailable("The server was shut down before this request was finished."))
                await send({"type": "http.response.body", "body": last, "more_body": False})
            raise


@router.post("/v1/messages")
async def create_messages(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
    """Answer a conversation, in Anthropic's form."""
    response = await answer_of(raw_request.app.state.anthropic_serving_messages.create_messages(request, raw_request))
    if isinstance(response, EventStreamResponse):
        return MessageStreamResponse(response.body_iterator, headers=dict(response.headers))
    return response


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
    """Count the tokens of a conversation, without an answer."""
    return await answer_of(raw_request.app.state.anthropic_serving_messages.count_tokens(request, raw_request))


def install(app: FastAPI, services: Services) -> None:
    """Add the routes and their handler, which takes answers apart as chats do."""
    app.state.anthropic_serving_messages = AnthropicServingMessages(
        services.engine, services.models, services.template, services.args, app.state.openai_serving_chat
    )
    app.include_router(router)
