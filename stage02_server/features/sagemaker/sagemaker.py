"""POST /invocations: the one address to which Amazon SageMaker sends every request (vllm/entrypoints/sagemaker/api_router.py).

Its other address, /ping, is another name of /health.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from stage02_server.api_server import Services
from stage02_server.middleware import RequestIds
from stage02_server.routes import health
from stage03_engine.errors import InvalidRequestError
from stage03_engine.mixins import is_there, load
from stagetrace import trace

router = APIRouter()
# Matched first: its 405 allows both.
router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)(health)
router.post("/ping")(health)
router.get("/ping")(health)
INVOCATIONS = "/invocations"
_POOLING = "stage02_server.features.pooling.routes"


class Target(NamedTuple):
    """A route that a body may be meant for: if the model has its task, and the body one of its fields."""

    path: str
    handler: str  # module:function
    task: str
    fields: tuple[str, ...]


TARGETS = (  # the first that fits is taken
    Target("/v1/chat/completions", "stage02_server.routes:create_chat_completion", "generate", ("messages",)),
    Target("/v1/completions", "stage02_server.routes:create_completion", "generate", ("prompt", "prompt_embeds")),
    Target("/v1/embeddings", f"{_POOLING}:create_embedding", "embed", ("input", "messages")),
    Target("/classify", f"{_POOLING}:create_classify", "classify", ("input", "messages")),
    Target("/rerank", f"{_POOLING}:do_rerank", "score", ("query",)),
    Target(
        "/score",
        f"{_POOLING}:create_score",
        "score",
        ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),
    ),
)


def target_of(body: dict[str, Any], tasks: tuple[str, ...]) -> Target:
    """The route that the body is meant for. Raises InvalidRequestError if it is meant for none of this server's."""
    served = [target for target in TARGETS if target.task in tasks and is_there(target.handler.partition(":")[0])]
    for target in served:
        if not body.keys().isdisjoint(target.fields):
            return target
    known = "; ".join(f"{target.path} takes {' or '.join(target.fields)}" for target in served)
    raise InvalidRequestError(f"Cannot tell which route the request is meant for: {known or 'there is none'}.")


def read(kind: type[BaseModel], body: dict[str, Any]) -> BaseModel:
    """The body as a request of this kind. Raises RequestValidationError, as the route itself would."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


def renamed(ids: RequestIds, old: str, prefix: str, request_id: str | None) -> RequestIds:
    """The ids of an answer that looks like the route's own: they begin with `prefix` instead of `old`. The engine's id stays: it was made before the body was read."""
    named = ids.named(request_id)
    response = prefix + named.response.removeprefix(old)
    if trace.on:
        trace.emit("request.named", req=ids.engine_id(0), response=response)
    return replace(named, response=response)


@router.post(INVOCATIONS)
async def invocations(body: dict[str, Any], raw_request: Request) -> Response:
    """A completion, a chat, vectors, classes or scores: what the fields of the body belong to."""
    services: Services = raw_request.app.state.services
    target = target_of(body, services.engine.vllm_config.supported_tasks)
    handler = load(target.handler)
    request = read(get_type_hints(handler)["request"], body)
    prefixes, named = raw_request.app.state.prefixes, getattr(request, "request_id", None)
    raw_request.state.ids = renamed(raw_request.state.ids, prefixes[INVOCATIONS], prefixes[target.path], named)
    answer: Response = await handler(request, raw_request)
    return answer


def install(app: FastAPI, services: Services) -> None:
    """Add the route."""
    app.include_router(router)
