"""The routes of Anthropic's Messages API (vllm/entrypoints/anthropic/api_router.py)."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from stage02_server.api_server import Services
from stage02_server.features.messages.errors import error_event
from stage02_server.features.messages.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from stage02_server.features.messages.serving import AnthropicServingMessages
from stage02_server.streaming import answer_of

router = APIRouter()


@router.post("/v1/messages")
async def create_messages(request: AnthropicMessagesRequest, raw_request: Request) -> Response:
    """Answer a conversation, in Anthropic's form."""
    raw_request.state.cut = error_event
    return await answer_of(raw_request.app.state.anthropic_serving_messages.create_messages(request, raw_request))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: AnthropicCountTokensRequest, raw_request: Request) -> Response:
    """Count the tokens of a conversation, without an answer."""
    return await answer_of(raw_request.app.state.anthropic_serving_messages.count_tokens(request, raw_request))


def install(app: FastAPI, services: Services) -> None:
    """Add the routes and their handler, which takes answers apart as chats do."""
    app.state.anthropic_serving_messages = AnthropicServingMessages(services, app.state.openai_serving_chat)
    app.include_router(router)
