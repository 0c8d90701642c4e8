"""Which JSON a tool's schema wants for a parameter that a model wrote as plain text (vllm/tool_parsers/utils.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from stage02_server.features.tools.fields import ToolParam
from stage02_server.features.tools.python_literals import python_json

_TYPES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}

Types = dict[str, dict[str, frozenset[str]]]
"""Function -> parameter -> the types that its schema allows; none are known for the others."""


def parameter_types(tools: Iterable[ToolParam]) -> Types:
    """What the tools' schemas say."""
    found: Types = {}
    for tool in tools:
        schema = tool.function.parameters or {}
        properties = schema.get("properties")
        names = properties.items() if isinstance(properties, dict) else ()
        read: dict[int, frozenset[str]] = {}
        found[tool.function.name] = {name: frozenset(_types(part, schema, read)) for name, part in names}
    return found


def _types(part: Any, whole: dict[str, Any], read: dict[int, frozenset[str]]) -> set[str]:
    """The types of a schema, of what it refers to and of its alternatives, but of nothing further inside. `read` keeps the types of each
    part that was read, by its id: thousands may refer to one that is long."""
    parts = [part]
    if isinstance(part, dict):
        parts += [option for word in ("anyOf", "oneOf") if isinstance(part.get(word), list) for option in part[word]]
    found: set[str] = set()
    for one in parts:
        if isinstance(one, dict):
            part = _referred(one, whole)
            if id(part) not in read:
                read[id(part)] = frozenset(_named(part))
            found |= read[id(part)]
    return found


def _referred(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    *_, place, name = ["", *str(part.get("$ref", "")).split("/")]
    definitions = whole.get(place)
    found = definitions.get(name) if isinstance(definitions, dict) else None
    return found if isinstance(found, dict) else part


def _named(part: dict[str, Any]) -> Iterable[str]:
    named = part.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [name for name in named if isinstance(name, str)]
    options = part.get("enum", [part["const"]] if "const" in part else [])
    return [_TYPES.get(type(option), "null") for option in options] if isinstance(options, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """The value as JSON: of a type that is allowed, or else a string. What is JSON already stays as it was written."""
    word = text.strip()
    if word.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if word.lower() in ("true", "false") and "boolean" in types:
        return word.lower()
    for found in (word, python_json(word)):
        if found is not None and _type_of(found) & types - {"string"}:
            return found
    return json.dumps(text, ensure_ascii=False)


def _type_of(text: str) -> set[str]:
    """The types that this JSON has."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return set()
    return {_TYPES[type(value)], "number"} if type(value) in (int, float) else {_TYPES.get(type(value), "null")}


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN is not JSON
