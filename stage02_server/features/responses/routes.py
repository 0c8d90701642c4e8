"""The routes of the Responses API (vllm/entrypoints/openai/responses/api_router.py)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stage02_server.api_server import Services
from stage02_server.features.responses.protocol import ResponsesRequest
from stage02_server.features.responses.protocol_output import DeletedResponse
from stage02_server.features.responses.serving import OpenAIServingResponses
from stage02_server.streaming import answer, answer_of

router = APIRouter()
ResponseId = Annotated[str, Path(description="The id of a stored response.")]


@router.post("/v1/responses")
async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Answer an input, or continue the conversation of an earlier response."""
    return await answer_of(raw_request.app.state.openai_serving_responses.create_responses(request, raw_request))


@router.get("/v1/responses/{response_id}")
async def retrieve_responses(
    response_id: ResponseId,
    raw_request: Request,
    stream: Annotated[
        bool, Query(description="Send the answer piece by piece while it is made, as server-sent events.")
    ] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, description="The number of an event; those behind it are sent.")
    ] = None,
) -> Response:
    """A stored response, or the events of one that is made in the background."""
    serving: OpenAIServingResponses = raw_request.app.state.openai_serving_responses
    return answer(serving.retrieve(response_id, stream, starting_after, raw_request))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_responses(response_id: ResponseId, raw_request: Request) -> Response:
    """End a response that is made in the background."""
    return answer(await raw_request.app.state.openai_serving_responses.cancel(response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_responses(response_id: ResponseId, raw_request: Request) -> DeletedResponse:
    """Forget a stored response, and end it if it is made in the background (OpenAI's; vLLM has no such route)."""
    await raw_request.app.state.openai_serving_responses.delete(response_id)
    return DeletedResponse(id=response_id)


class NotAllowed:
    """What answers a path's other methods. Starlette's own 405 names the methods of the first route with this path alone."""

    def __init__(self, *methods: str) -> None:
        self._allowed = ", ".join(sorted(methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises HTTPException 405."""
        raise HTTPException(405, headers={"Allow": self._allowed})


def install(app: FastAPI, services: Services) -> None:
    """Add the routes and their handler, which takes answers apart as chats do."""
    app.state.openai_serving_responses = OpenAIServingResponses(services, app.state.openai_serving_chat)
    app.include_router(router)
    app.router.routes.append(Route("/v1/responses/{response_id}", NotAllowed("GET", "DELETE"), include_in_schema=False))
