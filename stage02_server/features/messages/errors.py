"""Refusals as clients of Anthropic's API know them (vllm/entrypoints/anthropic/api_router.py, translate_error_response):

    {"type": "error", "error": {"type": "invalid_request_error", "message": "..."}}

vLLM keeps its own names of the types; here they are Anthropic's, by which its clients distinguish errors.
"""

from __future__ import annotations

import json

from stage02_server.errors import APIError
from stage02_server.features.messages.protocol_answer import AnthropicError, AnthropicErrorResponse

TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""HTTP status -> Anthropic's type. Any other one is an invalid request below 500, and a defect of the server from there on."""


def error_json(error: APIError) -> str:
    """The error object as JSON, in ASCII so that it can always be sent."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return json.dumps(AnthropicErrorResponse(error=AnthropicError(type=kind, message=error.message)).model_dump())


def error_event(error: APIError) -> bytes:
    """The event that ends a stream."""
    return f"event: error\ndata: {error_json(error)}\n\n".encode()
