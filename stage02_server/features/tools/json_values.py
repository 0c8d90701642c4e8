"""JSON from a client that goes back to it, or into a prompt, as JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

MAX_DEPTH = 128  # pydantic writes no JSON that is nested twice as deep


def _is_deep(value: Any, left: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(item, left - 1) for item in inner)


def _repeatable(value: dict[str, Any]) -> dict[str, Any]:
    if _is_deep(value, MAX_DEPTH):
        raise PydanticCustomError("too_deep", "Input must be nested less than {depth} deep", {"depth": MAX_DEPTH})
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("not_unicode", "Input holds half of a surrogate pair, which is not Unicode") from None
    return value


RepeatedJson = Annotated[dict[str, Any], AfterValidator(_repeatable)]
"""An object that can be written as JSON again."""
