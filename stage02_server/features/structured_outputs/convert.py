"""From the request fields of structured output to the engine's parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from stage02_server.features.structured_outputs.fields import StructuredOutputsFields
from stage03_engine.errors import InvalidRequestError
from stage03_engine.params.structured_outputs import KINDS, StructuredOutputsParams


def to_structured_outputs(request: StructuredOutputsFields) -> StructuredOutputsParams | None:
    """What the answer must match; None when nothing was asked for. Raises InvalidRequestError, also for two fields at once."""
    asked: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and (wanted := _response_format(request.response_format)):
        asked["response_format"] = wanted
    if request.structured_outputs is not None:
        asked["structured_outputs"] = _structured_outputs(request.structured_outputs)
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if len(asked) > 1:
        raise InvalidRequestError(f"Give only one of {' and '.join(asked)}.", list(asked)[-1])
    for source, wanted in asked.items():
        try:
            return msgspec.convert({**wanted, "source": source}, StructuredOutputsParams)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequestError):  # of the checks, wrapped by msgspec
                raise error.__cause__ from None
            raise InvalidRequestError(f"{source}: {error}.", source) from None
    return None


def _response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    if kind != "json_schema":
        raise InvalidRequestError(
            "response_format: type must be one of text, json_object, json_schema and structural_tag.", "response_format"
        )
    holder = value.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError(
            'response_format: type json_schema needs "json_schema": {"name": ..., "schema": {...}}.', "response_format"
        )
    return {"json": schema}


def _structured_outputs(value: dict[str, Any]) -> dict[str, Any]:
    given = {name: item for name, item in value.items() if item not in (None, False) or (name, item) == ("json", False)}
    for name in given:
        if name not in (*KINDS, "disable_any_whitespace"):
            raise InvalidRequestError(
                f"structured_outputs: {name} is not supported; there are {', '.join(KINDS)}.", "structured_outputs"
            )
    return given
