"""The routes of the Responses API (vllm/entrypoints/openai/responses/api_router.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from stage02_server.api_router import EventStreamResponse
from stage02_server.protocol_responses import ResponsesRequest, ResponsesResponse
from stage02_server.serving_engine import ClientGoneError

router = APIRouter()


def _answer(result: ResponsesResponse | AsyncGenerator[bytes, None]) -> Response:
    if isinstance(result, ResponsesResponse):
        return Response(result.model_dump_json(), media_type="application/json")
    return EventStreamResponse(result, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


@router.post("/v1/responses")
async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Answer an input, or continue the conversation of an earlier response."""
    try:
        return _answer(await raw_request.app.state.openai_serving_responses.create_responses(request, raw_request))
    except ClientGoneError:
        return Response(status_code=499)


@router.get("/v1/responses/{response_id}")
async def retrieve_responses(
    response_id: str,
    raw_request: Request,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """A stored response, or the events of one that is made in the background."""
    return _answer(raw_request.app.state.openai_serving_responses.retrieve(response_id, stream, starting_after))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_responses(response_id: str, raw_request: Request) -> Response:
    """End a response that is made in the background."""
    return _answer(await raw_request.app.state.openai_serving_responses.cancel(response_id))
