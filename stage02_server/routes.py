"""The routes: parse, hand to a handler, answer (vllm/entrypoints/openai/api_server.py, `router`)."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from stage02_server.errors import APIError, error_object, not_found
from stage02_server.lifecycle import ServerState
from stage02_server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from stage02_server.streaming import answer, answer_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Continue one or more prompts."""
    return await answer_of(raw_request.app.state.openai_serving_completion.create_completion(request, raw_request))


@router.post("/v1/chat/completions")
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Answer a chat."""
    return await answer_of(raw_request.app.state.openai_serving_chat.create_chat_completion(request, raw_request))


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw_request: Request) -> Response:
    """Forget all cached prefixes; 409 while requests run, because their blocks are in use."""
    if await raw_request.app.state.engine_client.reset_prefix_cache():
        return Response(status_code=200)
    raise APIError(
        409, "ConflictError", "The prefix cache is in use by running requests; try again when they are done."
    )


@router.get("/v1/models")
async def show_available_models(raw_request: Request) -> Response:
    """The names that requests may use."""
    return answer(raw_request.app.state.openai_serving_models.list())


@router.get("/v1/models/{name:path}")
async def show_model(name: str, raw_request: Request) -> Response:
    """One model; with no name after the slash all of them."""
    models = raw_request.app.state.openai_serving_models
    if not name:
        return answer(models.list())
    if name not in models.names:
        raise not_found(f"The model `{name}` does not exist; this server has {', '.join(models.names)}.", "model")
    return answer(models.card(name))


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Response:
    """Text to token ids."""
    handler = raw_request.app.state.openai_serving_tokenization
    # The text may be of any length, and tokenizing it must not hold up the streams: in a thread, without the GIL.
    return answer(await asyncio.to_thread(handler.create_tokenize, request))


@router.post("/detokenize")
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Response:
    """Token ids to text."""
    return answer(raw_request.app.state.openai_serving_tokenization.create_detokenize(request))


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # is asked first: its 405 allows both
async def health(raw_request: Request) -> Response:
    """200 and nothing else when requests are served; else 503 with the state of the server."""
    lifecycle = raw_request.app.state.lifecycle
    if lifecycle.state == ServerState.READY:
        return Response()
    return JSONResponse({"state": lifecycle.state.value, **error_object(lifecycle.unavailable())}, 503)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """The version of this project."""
    return {"version": version("vllm-in-stages")}
