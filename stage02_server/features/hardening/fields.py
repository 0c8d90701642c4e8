"""How much a request may hold: the items of its body, checked before pydantic validates each of them, and what its settings become
in the engine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, model_validator

from stage02_server.errors import APIError
from stage02_server.protocol_types import AnswerHook
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stage02_server.api_server import Services
    from stage02_server.serving_engine import EngineRequests, Prompts

MAX_ITEMS = 65536  # each wrong one costs microseconds and an error, while all others wait
MAX_FIELDS = 1024  # of the body itself; those that nothing knows are kept, and looked through several times
MAX_OBJECTS = 16384  # of the body in all; each becomes an object of ours, and then a part of a chat
MAX_KEYS = 4096  # of an object within it
_HARMLESS = {str, int, bool, type(None)}  # what needs no second look
TOKEN_IDS = ("prompt", "tokens", "input")  # --max-request-items bounds these


def check_number_of_items(body: dict[str, Any]) -> None:
    """Raises APIError for more than MAX_FIELDS fields, for a field that holds more than MAX_ITEMS items, at all depths together
    (token ids may be more), MAX_OBJECTS objects, or an object of more than MAX_KEYS, or NaN or Infinity anywhere within it: those
    pass many comparisons."""
    if len(body) > MAX_FIELDS:
        raise APIError(400, "BadRequestError", f"The body must have at most {MAX_FIELDS} fields.")
    objects = 0
    for name, value in body.items():
        count, waiting = 0, [] if name in TOKEN_IDS and _are_token_ids(value) else [value]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, dict):
                objects += 1
                if objects > MAX_OBJECTS:
                    raise APIError(400, "BadRequestError", f"The body must have at most {MAX_OBJECTS} objects.", name)
                if len(inner) > MAX_KEYS and name != "logit_bias":
                    raise APIError(
                        400, "BadRequestError", f"{name} must have at most {MAX_KEYS} keys in an object.", name
                    )
                inner = list(inner.values())
            if isinstance(inner, list):
                count += len(inner)
                if count > MAX_ITEMS:
                    raise APIError(400, "BadRequestError", f"{name} must have at most {MAX_ITEMS} items.", name)
                if not _HARMLESS.issuperset(map(type, inner)):
                    waiting.extend(inner)
            elif isinstance(inner, float) and inner is not value and not math.isfinite(inner):
                raise APIError(400, "BadRequestError", f"{name} must hold finite numbers only.", name)


def _are_token_ids(value: Any) -> bool:
    """True if it is to be read as token ids, which are as many as a prompt is long."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | list)


class BoundedBody(BaseModel):
    """Base of all request bodies."""

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, body: Any) -> Any:
        """Raises APIError."""
        if isinstance(body, dict):
            check_number_of_items(body)
        return body


class SettingsLimit:
    """The engine gets the settings of a request (its grammar, bad words, biases, ...) once for each answer to each prompt. So a
    body of 100 kB could become a gigabyte of messages."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def hook(self, requests: EngineRequests, prompts: Prompts) -> AnswerHook:
        """Raises InvalidRequestError."""
        params = requests.engine_requests[0].sampling_params
        copies = len(prompts) * params.num_answers
        if copies > 1 and (size := len(msgspec.msgpack.encode(params))) * copies > self._max_bytes:
            raise InvalidRequestError(
                f"The request's settings take {size} bytes for each of {copies} answers; all together may take "
                f"{self._max_bytes} (--max-settings-bytes).",
                "prompt" if len(prompts) > 1 else "n",
            )
        return AnswerHook()


def install(app: FastAPI, services: Services) -> None:
    """Check the settings of all requests that the handlers get."""
    limit = SettingsLimit(services.args.max_settings_bytes)
    for handler in app.state._state.values():
        if hasattr(handler, "hook_factories"):
            handler.hook_factories.append(limit.hook)
