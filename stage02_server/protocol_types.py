"""Types of single fields of requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, StrictInt
from pydantic_core import PydanticCustomError


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_unicode", "Input holds half of a surrogate pair, which is not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]  # JSON can spell "\ud800" alone; UTF-8, and so the tokenizer, cannot
MAX_DEPTH = 128  # pydantic writes no JSON that is nested twice as deep


def _is_deep(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(item, left - 1) for item in inner)


def _repeatable(value: dict[str, Any]) -> dict[str, Any]:
    if _is_deep(value, MAX_DEPTH):
        raise PydanticCustomError("too_deep", "Input must be nested less than {depth} deep", {"depth": MAX_DEPTH})
    _encodable(json.dumps(value, ensure_ascii=False))
    return value


RepeatedJson = Annotated[dict[str, Any], AfterValidator(_repeatable)]  # the answer repeats it, so it must be JSON again
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what a tensor of integers can hold
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what msgpack can hold
# fail_fast: a list of a million wrong items is one complaint, not a million of them.
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]
T = TypeVar("T")
MAX_PROMPTS = 4096
Several = Annotated[list[T], Field(max_length=MAX_PROMPTS, fail_fast=True)]
