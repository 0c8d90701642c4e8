"""Which JSON schemas are taken: those whose every keyword the grammar compiler enforces.

xgrammar ignores what it does not know, and some keywords next to others. An answer that parses but breaks the schema is worse
than a refusal, so this is a list of what is allowed (vLLM: has_xgrammar_unsupported_json_features, a list of what is not).
"""

from __future__ import annotations

import json
from typing import Any

from stage03_engine.grammar.regex import check_regex

MAX_DEPTH = 64

_ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    ]
)
_RANGE = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_KEYWORDS: dict[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": _RANGE,
    "number": _RANGE,
    "boolean": frozenset(),
    "null": frozenset(),
}
_PYTHON: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),),
}  # fmt: skip


def check_json_schema(schema: Any, depth: int = 0) -> str | None:
    """What is wrong with a schema (a parsed JSON value), or None."""
    if depth > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(schema, bool):
        return None if schema else "holds the schema `false`, which nothing matches"
    if not isinstance(schema, dict):
        return f"must be a JSON object or true, got {_shown(schema)}"
    keywords = schema.keys() - _ANNOTATIONS
    for name in ("$defs", "definitions"):
        if (problem := _check_map(schema.get(name, {}), name, depth)) is not None:
            return problem
    if not keywords:
        return None
    for name in ("$ref", "anyOf", "allOf"):
        if name in keywords:
            return _check_combination(name, schema[name], keywords, depth)
    if keywords & {"enum", "const"}:
        return _check_values(schema, keywords)
    return _check_types(schema, keywords, depth)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_map(schemas: Any, name: str, depth: int) -> str | None:
    if not isinstance(schemas, dict):
        return f"{name} must be an object"
    return next((p for s in schemas.values() if (p := check_json_schema(s, depth + 1)) is not None), None)


def _check_combination(name: str, value: Any, keywords: set[str], depth: int) -> str | None:
    """$ref, anyOf, allOf: the compiler ignores keywords next to them."""
    if len(keywords) > 1:
        return f"has {', '.join(sorted(keywords - {name}))} next to {name}, which is not supported"
    if name == "$ref":
        local = isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return (
            None if local else f"has a $ref to {_shown(value)}; only places in the schema itself (#/...) are supported"
        )
    if not isinstance(value, list) or not value:
        return f"{name} must be a list of schemas"
    if name == "allOf" and len(value) > 1:
        return "has allOf with more than one schema, which is not supported"
    return next((p for s in value if (p := check_json_schema(s, depth + 1)) is not None), None)


def _check_values(schema: dict[str, Any], keywords: set[str]) -> str | None:
    """enum and const: the compiler ignores everything next to them, so what stands there must be true already."""
    if keywords > {"enum", "const"} or keywords - {"enum", "const", "type"}:
        return "has other keywords next to enum or const, which is not supported"
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or not values:
        return "enum must be a list of at least one value"
    types = schema.get("type", list(_PYTHON))
    allowed = [t for name in ([types] if isinstance(types, str) else types) for t in _PYTHON.get(name, ())]
    wrong = [v for v in values if not any(isinstance(v, t) and (t is bool or type(v) is not bool) for t in allowed)]
    return f"has the value {_shown(wrong[0])}, which is not of its type" if wrong else None


def _check_types(schema: dict[str, Any], keywords: set[str], depth: int) -> str | None:
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not types:
        return f"has {', '.join(sorted(keywords))} without a type"
    if unknown := [t for t in types if not isinstance(t, str) or t not in _KEYWORDS]:
        return f"has the unknown type {_shown(unknown[0])}"
    if extra := sorted(keywords - {"type"} - frozenset().union(*(_KEYWORDS[t] for t in types))):
        return f"uses {extra[0]}, which is not supported for the type {' or '.join(types)}"
    problem = _check_object(schema, depth)
    problem = problem or _check_array(schema, depth)
    problem = problem or _check_string(schema)
    return problem or _check_numbers(schema)


def _check_object(schema: dict[str, Any], depth: int) -> str | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (problem := _check_map(properties, "properties", depth)) is not None:
        return problem
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required must be a list of names"
    if unknown := [name for name in required if name not in properties]:
        return f"requires {_shown(unknown[0])}, which is not among its properties"
    rest = schema.get("additionalProperties", False)
    if rest is not False and properties:  # "\\u0061" spells "a": such a key would get past the schema of "a"
        return "has additionalProperties next to properties, which is not supported; leave it out or set it to false"
    return None if rest is False else check_json_schema(rest, depth + 1)


def _check_array(schema: dict[str, Any], depth: int) -> str | None:
    items, prefix = schema.get("items", True), schema.get("prefixItems", [])
    if not isinstance(prefix, list):
        return "prefixItems must be a list of schemas"
    found = (check_json_schema(s, depth + 1) for s in ([] if items is False else [items]) + prefix)
    problem = next((p for p in found if p is not None), None)
    return problem or _check_counts(schema, ("minItems", "maxItems"))


def _check_string(schema: dict[str, Any]) -> str | None:
    shaped = [name for name in ("pattern", "format") if name in schema]
    if len(shaped) == 2 or (shaped and schema.keys() & {"minLength", "maxLength"}):
        return f"has {shaped[0]} next to another keyword for strings, which is not supported"
    if shaped and not isinstance(schema[shaped[0]], str):
        return f"{shaped[0]} must be a text"
    if "pattern" in schema and (problem := check_regex(schema["pattern"], in_json=True)) is not None:
        return f"has a pattern that {problem}"
    return _check_counts(schema, ("minLength", "maxLength"))


def _check_counts(schema: dict[str, Any], names: tuple[str, str]) -> str | None:
    for name in names:
        if name in schema and not (type(schema[name]) is int and schema[name] >= 0):
            return f"{name} must be an integer of at least 0, got {_shown(schema[name])}"
    low, high = schema.get(names[0], 0), schema.get(names[1])
    return None if high is None or low <= high else f"has {names[0]} {low} above {names[1]} {high}"


def _check_numbers(schema: dict[str, Any]) -> str | None:
    for name in sorted(_RANGE & schema.keys()):
        if type(schema[name]) not in (int, float):
            return f"{name} must be a number, got {_shown(schema[name])}"
    return None
