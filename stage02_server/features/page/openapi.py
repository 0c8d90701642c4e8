"""What /openapi.json says where FastAPI cannot know it: of fields, answers, error objects, and streams.

vLLM declares the same at each route; here it is one rule for all of them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from stage02_server.features.pooling.protocol import (
    ClassificationResponse,
    EmbeddingResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from stage02_server.features.responses.protocol_output import ResponsesResponse
from stage02_server.field_descriptions import describe_fields
from stage02_server.protocol_response import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    ModelList,
    TokenizeResponse,
)

EMPTY = {"/health", "/ping", "/reset_prefix_cache"}
"""Routes whose 200 has no body."""

STREAMED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{response_id}"}
"""Routes that answer with server-sent events where the request asks for them."""

ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/responses": ResponsesResponse,
    "/v1/responses/{response_id}": ResponsesResponse,
    "/v1/responses/{response_id}/cancel": ResponsesResponse,
    "/v1/models": ModelList,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/v1/embeddings": EmbeddingResponse,
    "/pooling": PoolingResponse,
    "/classify": ClassificationResponse,
    **dict.fromkeys(["/score", "/v1/score"], ScoreResponse),
    **dict.fromkeys(["/rerank", "/v1/rerank", "/v2/rerank"], RerankResponse),
}
"""What the JSON of a 200 looks like. The handlers encode it themselves, so FastAPI does not know it."""

OTHER_TYPE = {"/metrics": "text/plain", "/v1/engine/events": "text/event-stream"}
"""Routes whose 200 is not JSON at all."""


def describe_answers(app: FastAPI) -> None:
    """Make the application describe its answers as they are. To be called when all routes are in place."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(make())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change the description


def _described(description: dict[str, Any]) -> dict[str, Any]:
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    answers = _shapes_of_answers()
    schemas.update(answers)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape of an error, which no route sends
        schemas.pop(name, None)
    describe_fields(description, answers)
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["default"] = {
                "description": "An error object",
                "content": {"application/json": {"schema": error}},
            }
            if path in EMPTY:
                responses["200"].pop("content", None)
            if path in ANSWERS:
                responses["200"]["content"]["application/json"]["schema"] = {
                    "$ref": f"#/components/schemas/{ANSWERS[path].__name__}"
                }
            if path in STREAMED:
                responses["200"]["content"]["text/event-stream"] = {}
            if path in OTHER_TYPE:
                responses["200"]["content"] = {OTHER_TYPE[path]: {}}
    return description


def _shapes_of_answers() -> dict[str, Any]:
    """The JSON schemas of all answers and of what they hold, by name."""
    shapes: dict[str, Any] = {}
    models: list[type[BaseModel]] = [ErrorResponse, *ANSWERS.values()]
    for model in models:
        own = model.model_json_schema(ref_template="#/components/schemas/{model}")
        shapes.update(own.pop("$defs", {}))
        shapes[model.__name__] = own
    return shapes
