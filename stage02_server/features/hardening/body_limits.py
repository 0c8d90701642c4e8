"""How much a request may hold (vLLM: the bytes of its header only).

`BodyLimitMiddleware` counts while the body arrives, before anything parses it; `BoundedBody` looks at what was parsed, before
pydantic validates each item; `SettingsLimit` at what its settings become in the engine.
"""

from __future__ import annotations

import codecs
import math
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, model_validator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stage02_server.errors import APIError, error_response
from stage02_server.features.hardening.manifest import HardeningFlags
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stage02_server.api_server import Services
    from stage02_server.serving_engine import EngineRequests, Prompts

MAX_ITEMS = 65536  # each wrong one costs microseconds and an error, while all others wait
MAX_FIELDS = 1024  # of the body itself, of a query, a form and the cookies: each is looked at several times
MAX_OBJECTS = 16384  # of the body in all; each becomes an object of ours, and then a part of a chat
MAX_KEYS = 4096  # of an object within it
_HARMLESS = {str, int, bool, type(None)}  # what needs no second look
TOKEN_IDS = ("prompt", "tokens", "input")  # --max-request-items bounds these
MULTIPART_BYTES = 32 * 1024**2  # an uploaded file is not parsed as JSON, which is what makes a large body expensive

URL_ENCODED = "application/x-www-form-urlencoded"
COMPRESSIONS = {"gzip", "x-gzip", "deflate", "compress", "br", "zstd"}  # a small body that becomes a large one
MOST_CODINGS = 1024  # characters of their names; more is no list that a client would make
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


class ItemCounter:
    """Counts the commas, the opening brackets and the colons of JSON: items, and keys once more. Those within texts do not count.
    Linear.

    Invariant: `_in_text` says whether a text is open behind all that was counted; `_held` is a backslash there whose second half is
    still to come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._in_text = False
        self._held = b""
        self._head = b""  # the first four bytes: they tell how the rest is encoded

    def add(self, piece: bytes) -> int:
        """Count the next piece as well; returns the number so far."""
        if len(self._head) < 4:
            self._head = (self._head + piece)[:4]
        if b"\0" in self._head or self._head.startswith(BYTE_ORDER_MARKS):
            # UTF-16 or UTF-32: a quote may be half a character, so those in texts count too
            self.count += _items(piece)
        else:
            self.count += _items(b"".join(self._outside(piece)))
        return self.count

    def _outside(self, piece: bytes) -> list[bytes]:
        """What is not within a text."""
        piece = (self._held + piece).replace(rb"\\", b"")  # pairs, so that what is left escapes what follows
        self._held = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = parts[self._in_text :: 2]
        self._in_text ^= len(parts) % 2 == 0
        return outside


def _items(piece: bytes) -> int:
    return piece.count(b",") + piece.count(b"[") + piece.count(b"{") + piece.count(b":")


class BodyLimitMiddleware:
    """413 for a body that is too long: at once if its header says so, else when a limit is passed. 400 for a query of too many
    parts, and 431 for too many cookies."""

    def __init__(self, app: ASGIApp, args: HardeningFlags) -> None:
        self._app, self._max_bytes, self._max_items = app, args.max_request_bytes, args.max_request_items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (wrong := _fields_refused(scope, headers)) is not None:
            await error_response(scope, wrong)(scope, receive, send)
            return
        content_type = headers.get("content-type", "").lower()
        is_upload, is_form = content_type.startswith("multipart/form-data"), content_type.startswith(URL_ENCODED)
        limit = max(self._max_bytes, MULTIPART_BYTES) if is_upload else self._max_bytes
        # While it reads a body, FastAPI passes on an HTTPException and turns everything else into a 400.
        refusal = HTTPException(413, f"The body may have at most {limit} bytes (--max-request-bytes).")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > limit:
            await error_response(scope, refusal)(scope, receive, send)
            return
        codings = headers.get("content-encoding", "").lower()
        if len(codings) > MOST_CODINGS or COMPRESSIONS & {word.strip() for word in codings.split(",")}:
            packed = APIError(415, "BadRequestError", "The body must not be compressed: leave Content-Encoding out.")
            await error_response(scope, packed)(scope, receive, send)
            return
        taken, separators, items = 0, 0, ItemCounter()

        async def receive_within_limit() -> Message:
            nonlocal taken, separators
            message = await receive()
            body = message.get("body", b"")
            taken += len(body)
            if taken > limit:
                raise refusal
            separators += body.count(b"&") if is_form else 0
            if separators >= MAX_FIELDS:
                raise HTTPException(413, f"A form may have at most {MAX_FIELDS} fields.")
            if not is_upload and items.add(body) > self._max_items:
                raise HTTPException(413, f"The body may hold at most {self._max_items} items (--max-request-items).")
            return message

        await self._app(scope, receive_within_limit, send)


def _fields_refused(scope: Scope, headers: Headers) -> APIError | None:
    """What the framework would split on the event loop, whether the route needs it or not."""
    if scope.get("query_string", b"").count(b"&") >= MAX_FIELDS:
        return APIError(400, "Bad Request", f"The query may have at most {MAX_FIELDS} parts.")
    if sum(cookies.count(";") for cookies in headers.getlist("cookie")) >= MAX_FIELDS:
        return APIError(431, "BadRequestError", f"There may be at most {MAX_FIELDS} cookies.")
    return None


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

    def check(self, requests: EngineRequests, prompts: Prompts) -> None:
        """Raises InvalidRequestError."""
        params = requests.engine_requests[0].sampling_params
        copies = len(prompts) * params.num_answers
        if copies > 1 and (size := len(msgspec.msgpack.encode(params))) * copies > self._max_bytes:
            raise InvalidRequestError(
                f"The request's settings take {size} bytes for each of {copies} answers; all together may take "
                f"{self._max_bytes} (--max-settings-bytes).",
                "prompt" if len(prompts) > 1 else "n",
            )


def install(app: FastAPI, services: Services) -> None:
    """Check the settings of all requests that the handlers get."""
    services.added.hooks.append(SettingsLimit(services.args.max_settings_bytes).check)
