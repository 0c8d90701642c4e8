"""What is refused before any grammar compiler sees it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import MAX_GRAMMAR_CHARACTERS, StructuredOutputsParams

KEYWORDS = [
    "type",
    "properties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "pattern",
    "minLength",
    "required",
    "$defs",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.sampled_from(["object", "string", "#", "a+", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(json_values)
def test_any_json_value_is_taken_or_refused_with_the_field_named(value: Any) -> None:
    try:
        params = StructuredOutputsParams(json=json.dumps(value), source="guided_json")
    except InvalidRequestError as error:
        assert error.param == "guided_json" and str(error).startswith("guided_json: ")
    else:
        assert params.key == ("json", json.dumps(value, separators=(",", ":"), ensure_ascii=False))


@given(st.text(alphabet="ab(){}[]^$|*+?\\.-,0nsbAé", max_size=12))
def test_any_regex_is_taken_or_refused(pattern: str) -> None:
    try:
        StructuredOutputsParams(regex=pattern)
    except InvalidRequestError as error:
        assert error.param == "structured_outputs"


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + "true" + "}" * levels


STRING = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        "x", "[1", "NaN", '{"const": Infinity}', "null", "3", '"a"', "false", deep(70), deep(5000),
        {"type": "nope"}, {"type": []}, {"minimum": 3}, {"type": "string", "minimum": 3}, {"type": "integer", "multipleOf": 2},
        {"type": "object", "properties": {"a": STRING}, "required": ["b"]}, {"type": "object", "minProperties": 1},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"a": STRING}}, {"type": "object", "properties": [1]}, {"type": "object", "required": "a"},
        {"type": "array", "uniqueItems": True}, {"type": "array", "items": [STRING]}, {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "minItems": -1}, {"type": "array", "minItems": 1.5}, {"type": "string", "maxLength": "3"},
        {"type": "string", "pattern": "a", "maxLength": 3}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": '"'},
        {"type": "string", "pattern": "\\n"}, {"type": "string", "pattern": "\\\\"}, {"type": "string", "pattern": "\n"},
        {"enum": []}, {"enum": 3}, {"type": "string", "const": 3}, {"type": "integer", "enum": [1, True]}, {"const": 1, "minimum": 2},
        {"anyOf": []}, {"anyOf": [STRING], "type": "string"}, {"oneOf": [STRING]}, {"allOf": [STRING, STRING]}, {"not": STRING},
        {"$ref": "http://a/b"}, {"$ref": 3}, {"$ref": "#", "type": "string"}, {"$defs": {"a": {"not": {}}}}, {"$defs": 3},
        {"type": "integer", "minimum": "1"}, {"type": "integer", "minimum": float("nan")}, {"type": "number", "maximum": True},
        {"type": "string", "title": "\ud800"}, {"title": "x" * MAX_GRAMMAR_CHARACTERS},
    ],
    ids=lambda schema: (schema if isinstance(schema, str) else repr(schema))[:60],
)  # fmt: skip
def test_schemas_that_would_not_be_enforced_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(json=schema)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{3,1}", r"a\b", r"\Aa", r"a\Z", r"\p{L}", r"(a)\1", "a^b", "a$b", "(a$)", "x(^a)", "a{", "[[a]b]", "\0", "\ud800", "(" * 5000,
     "a" * (MAX_GRAMMAR_CHARACTERS + 1)],
    ids=lambda pattern: ascii(pattern)[:20],
)  # fmt: skip
def test_patterns_that_would_mean_something_else_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(regex=pattern)


@pytest.mark.parametrize(
    "pattern", ["^a$|^b$", r"\d{2}-[^\]\n]{,3}", r"[\w.-]+@\w+\.com", "(?:ab)*", "[a$^]", r"\$\{", ""]
)
def test_usual_patterns_are_taken(pattern: str) -> None:
    assert StructuredOutputsParams(regex=pattern).key == ("regex", pattern)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "none"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json": False}, "false"),
        ({"json": {"a": {1}}}, "JSON"),
        ({"json_object": False}, "none"),
        ({"choice": []}, "at least one"),
        ({"choice": ["a", ""]}, "empty"),
        ({"grammar": "start ::= 'a'"}, "root"),
        ({"grammar": "root ::= " + "a" * MAX_GRAMMAR_CHARACTERS}, "65536"),
    ],
)
def test_exactly_one_kind_that_can_be_right(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        StructuredOutputsParams(**fields)


def test_it_travels_as_msgpack_and_keeps_the_order_of_properties() -> None:
    params = StructuredOutputsParams(
        json={"type": "object", "properties": {"b": True, "a": True}}, source="guided_json"
    )
    assert params.key[1] == '{"type":"object","properties":{"b":true,"a":true}}'
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params


@pytest.mark.parametrize(
    "setting", [{"grammar_cache_size": 0}, {"grammar_compile_seconds": float("nan")}, {"grammar_step_seconds": 0.0}, {"grammar_memory_bytes": 0}]
)  # fmt: skip
def test_impossible_limits_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting)).replace("_", ".")):
        LLM("gpt2-tiny", **setting)
