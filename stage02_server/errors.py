"""Refusals over HTTP: one error object, made in one place (vllm/entrypoints/serve/exception_handling/error_response.py, create_error_response).

    {"error": {"message": "...", "type": "BadRequestError", "param": "max_tokens", "code": 400}}

There are two kinds of 400, as in vLLM: the body has the wrong form (type "Bad Request", `param` "body.<field>"),
or its form is right but it cannot be served ("BadRequestError", the bare field).
"""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from stage02_server.protocol_response import ErrorInfo, ErrorResponse
from stage03_engine.errors import BusyError, EngineDeadError, InvalidRequestError
from stage03_engine.plugins import keys
from stagetrace import trace

logger = logging.getLogger(__name__)
RETRY_AFTER_SECONDS = 1  # a step takes milliseconds: a second later the queue has changed
MOST_CHARACTERS = 4096  # of a message: it may quote what it refuses


class APIError(Exception):
    """A refusal with its HTTP status, OpenAI's error type, and the field to blame."""

    def __init__(
        self, status: int, type: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.message = status, type, message[:MOST_CHARACTERS]
        self.param, self.headers = param, headers


def not_found(message: str, param: str | None = None) -> APIError:
    """404: the thing that the request names does not exist here."""
    return APIError(404, "NotFoundError", message, param)


def unavailable(message: str) -> APIError:
    """503: the server cannot answer, for now or for good."""
    return APIError(503, "ServiceUnavailableError", message)


def as_api_error(error: BaseException) -> APIError:
    """Any exception as a refusal. An unexpected one becomes a 500 that reveals no internals."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, BusyError):
        return APIError(429, "RateLimitError", str(error), error.param, {"Retry-After": str(RETRY_AFTER_SECONDS)})
    if isinstance(error, InvalidRequestError):
        return APIError(400, "BadRequestError", str(error), error.param)
    if isinstance(error, EngineDeadError):
        return unavailable("The engine has died; this server is shutting down.")
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):  # from the framework: unknown route, wrong method, unreadable body
        return APIError(error.status_code, HTTPStatus(error.status_code).phrase, str(error.detail))
    return APIError(500, "InternalServerError", "The server failed on this request; its log says why.")


def as_reported(error: Exception, response_id: str) -> APIError:
    """The same for an error in a stream. Its status is already sent, so an unexpected error is logged here or nowhere."""
    refusal = as_api_error(error)
    if trace.on:
        trace.emit("request.refused", req=f"{response_id}-0", status=refusal.status, type=refusal.type)
    if refusal.status == 500 and refusal is not error:
        logger.error("request %s failed", response_id, exc_info=error)
    return refusal


def _from_validation(error: RequestValidationError) -> APIError:
    """One message about the first wrong field. It leaves out the value, which may be large, secret, or not Unicode."""
    details = error.errors()
    first = details[0]["loc"]
    field = first[1] if len(first) > 1 and isinstance(first[1], str) else None
    if details[0]["type"] == "json_invalid":
        message = f"The body is not valid JSON: {details[0]['ctx']['error']} at character {first[-1]}."
    elif field is None:
        message = "The body must be a JSON object, sent with the header Content-Type: application/json."
    else:
        said = dict.fromkeys(str(d["msg"]) for d in details if d["loc"][1:2] == (field,))
        message = f"{field}: {'; or '.join(said)}."
    return APIError(400, "Bad Request", message, "body" if field is None else f"{first[0]}.{field}")


def error_object(error: APIError) -> dict[str, Any]:
    """`{"error": {...}}`."""
    info = ErrorInfo(message=error.message, type=error.type, param=error.param, code=error.status)
    return ErrorResponse(error=info).model_dump()


def error_json(error: APIError) -> str:
    """The error object as JSON, in ASCII so that it can always be sent."""
    return json.dumps(error_object(error))


def error_response(scope: Scope, error: BaseException) -> Response:
    """The whole answer to a refused request."""
    refusal = as_api_error(error)
    if trace.on:
        trace.emit("request.refused", req=scope["state"].get("req"), status=refusal.status, type=refusal.type)
    headers = getattr(error, "headers", refusal.headers)  # a 405 lists the allowed methods
    path = scope["state"].get("path", "")
    own = next((part for begin, part in keys("error").items() if path.startswith(begin)), None)
    as_json = error_json if own is None else own.load()
    return Response(as_json(refusal), refusal.status, headers, media_type="application/json")


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(request.scope, error)


def add_exception_handlers(app: FastAPI) -> None:
    """Every exception that can leave a handler becomes an error object. (Starlette logs the unexpected ones.)"""
    for kind in (APIError, InvalidRequestError, EngineDeadError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)
