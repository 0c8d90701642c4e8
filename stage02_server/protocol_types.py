"""Types of single fields of requests."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, StrictInt
from pydantic_core import PydanticCustomError


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_unicode", "Input holds half of a surrogate pair, which is not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]  # JSON can spell "\ud800" alone; UTF-8, and so the tokenizer, cannot
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what a tensor of integers can hold
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what msgpack can hold
# fail_fast: a list of a million wrong items is one complaint, not a million of them.
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]
T = TypeVar("T")
MAX_PROMPTS = 4096
Several = Annotated[list[T], Field(max_length=MAX_PROMPTS, fail_fast=True)]
