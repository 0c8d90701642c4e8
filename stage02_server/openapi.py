"""What /openapi.json says where FastAPI cannot know it: of fields, error objects, streams, and answers without a body.

vLLM declares the same at each route; here it is one rule for all of them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from stage02_server.field_descriptions import describe_fields
from stage02_server.protocol_response import ErrorResponse

EMPTY = {"/health", "/ping", "/reset_prefix_cache"}
"""Routes whose 200 has no body."""

STREAMED = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
"""Routes that answer with server-sent events where the request asks for them."""

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
    own = ErrorResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(own.pop("$defs", {}))
    schemas["ErrorResponse"] = own
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape of an error, which no route sends
        schemas.pop(name, None)
    describe_fields(description)
    error = {"$ref": "#/components/schemas/ErrorResponse"}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            answers["default"] = {"description": "An error object", "content": {"application/json": {"schema": error}}}
            if path in EMPTY:
                answers["200"].pop("content", None)
            if path in STREAMED:
                answers["200"]["content"]["text/event-stream"] = {}
            if path in OTHER_TYPE:
                answers["200"]["content"] = {OTHER_TYPE[path]: {}}
    return description
