"""What is refused, by the API process or by the process that checks grammars, and what is enforced instead."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, strategies as st

from stage03_engine.core.features.structured_output.backend_guidance import Guidance
from stage03_engine.core.features.structured_output.grammar_checker import GrammarChecker, LostError, check
from stage03_engine.core.features.structured_output.lark import to_lark
from stage03_engine.core.features.structured_output.manifest import StructuredOutputsConfig
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.grammar.vocabulary import Vocabulary
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


BYTES = Guidance(Vocabulary([bytes([byte]) for byte in range(256)], None), 256)
STRING = {"type": "string"}


def error_of(**fields: Any) -> str:
    """What the engine says of a grammar that the API process lets through; "" if it can be used."""
    return check(BYTES, *StructuredOutputsParams(**fields).key, any_whitespace=True)[0]


def follows(text: str, **fields: Any) -> bool:
    """May this text be the whole answer?"""
    matcher = BYTES.compile(to_lark(*StructuredOutputsParams(**fields).key))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    ["x", "[1", "NaN", '{"const": Infinity}', "null", "3", '"a"', "false", deep(5000), {"type": "integer", "minimum": float("nan")},
     {"type": "string", "title": "\ud800"}, {"title": "x" * MAX_GRAMMAR_CHARACTERS}],
    ids=lambda schema: (schema if isinstance(schema, str) else repr(schema))[:60],
)  # fmt: skip
def test_what_is_no_schema_never_reaches_the_engine(schema: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(json=schema)
    assert caught.value.param == "structured_outputs" and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "schema",
    [
        deep(200), {"type": "nope"}, {"type": []}, {"type": "object", "properties": {"a": STRING}, "required": ["b"]},
        {"type": "object", "properties": [1]}, {"type": "object", "required": "a"}, {"type": "array", "uniqueItems": True},
        {"type": "array", "minItems": 3, "maxItems": 2}, {"type": "array", "minItems": -1}, {"type": "array", "minItems": 1.5},
        {"type": "string", "maxLength": "3"}, {"type": "string", "pattern": "("}, {"type": "string", "pattern": "[[a]b]"},
        {"type": "string", "pattern": "a\\"}, {"type": "string", "pattern": "a\\b"}, {"type": "string", "format": "nope"},
        {"enum": []}, {"enum": 3}, {"type": "string", "const": 3}, {"const": 1, "minimum": 2}, {"anyOf": []}, {"not": STRING},
        {"oneOf": [STRING, {"minLength": 3}]}, {"$ref": "http://a/b"}, {"$ref": 3}, {"$ref": "#", "type": "string"}, {"$ref": "#"},
        {"type": "integer", "minimum": "1"}, {"type": "number", "maximum": True}, {"if": STRING}, {"x-guidance": {"lenient": True}, "not": {}},
    ],
    ids=lambda schema: (schema if isinstance(schema, str) else repr(schema))[:60],
)  # fmt: skip
def test_schemas_that_would_not_be_enforced_are_refused(schema: Any) -> None:
    assert 0 < len(error_of(json=schema)) < 200


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": 3}, ["3", '"a"'], ["2"]),
        ({"type": "string", "minimum": 3}, ['"a"'], ["3"]),
        ({"type": "integer", "multipleOf": 2}, ["4"], ["3"]),
        ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
        ({"type": "object", "properties": {"a": STRING}}, ['{"a":""}', "{}"], ['{"b":1}']),
        (
            {"properties": {"a": STRING}, "additionalProperties": True},
            ['{"a":""}', '{"b":1}'],
            ['{"a":1}', '{"\\u0061":1}'],
        ),
        ({"type": "object", "patternProperties": {"^a$": STRING}}, ['{"a":""}'], ['{"a":1}', '{"b":1}']),
        ({"type": "array", "items": [STRING]}, ['[""]'], ["[1]"]),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, ['"aaa"'], ['"aaaa"', '"xa"', '"a "']),
        ({"type": "string", "pattern": '"'}, ['"\\""'], ['"a"']),
        ({"type": "string", "pattern": "^(\n|\\\\)$"}, ['"\\n"', '"\\\\"'], ['"n"']),
        ({"type": "integer", "enum": [1, True]}, ["1"], ["true"]),
        ({"anyOf": [STRING, {"type": "null"}], "type": "string"}, ['""'], ["null"]),
        ({"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 5}]}, ["4"], ["2", "6"]),
        ({"const": {"properties": {}}}, ['{"properties":{}}'], ["{}"]),
    ],
    ids=str,
)
def test_keywords_side_by_side_are_enforced(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert error_of(json=schema) == ""
    assert [text for text in right if not follows(text, json=schema)] == []
    assert [text for text in wrong if follows(text, json=schema)] == []


@pytest.mark.parametrize(
    "pattern", ["\0", "\ud800", "a" * (MAX_GRAMMAR_CHARACTERS + 1)], ids=lambda pattern: ascii(pattern)[:20]
)
def test_what_is_no_pattern_never_reaches_the_engine(pattern: str) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{3,1}", r"a\b", r"a\Z", r"(a)\1", "a^b", "a$b", "x(^a)", "a{", "[[a]b]", "[a&&b]", "[a", "a\\", "a)(", "(" * 5000, "(?#x)a"],
    ids=lambda pattern: ascii(pattern)[:20],
)  # fmt: skip
def test_patterns_that_would_mean_something_else_are_refused(pattern: str) -> None:
    assert "regular expression" in error_of(regex=pattern) and len(error_of(regex=pattern)) < 200


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^a$|^b$", ["a", "b"], ["ab"]),
        (r"\d{2}-[^\]\n]{,3}", ["12-abc", "12-"], ["12-abcd", "12-\n"]),
        (r"[\w.-]+@\w+\.com", ["a.b@c.com"], ["é@c.com"]),
        ("(?:ab)*", ["abab"], ["aba"]),
        ("[a$^]", ["$"], ["b"]),
        (r"\$\{", ["${"], ["$"]),
        (".", ["é", "\n"], [""]),
        (r"a/b\/c", ["a/b/c"], ["a/b"]),
        (r"\{,2}", ["{,2}"], ["{0,2}"]),
        ("(a$)", ["a"], ["aa"]),
        ("(?i)ab", ["aB"], ["a"]),
    ],
)
def test_usual_patterns_are_taken(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert error_of(regex=pattern) == ""
    assert all(follows(text, regex=pattern) for text in right) and not any(
        follows(text, regex=pattern) for text in wrong
    )


@pytest.mark.parametrize(
    ("rules", "right", "wrong"),
    [
        ('root ::= "\\u00e9" [\\-\\u0041-C] ("a"{2}){3}', ["é-aaaaaa", "éBaaaaaa"], ["éa"]),
        ('root ::= [a-z]+ "ab"', ["abab"], ["ab"]),
        ('root ::= first-rule | "(" root ")"  # pairs\nfirst-rule ::= [^()]', ["((x))"], ["((x)"]),
    ],
)
def test_grammars_in_gbnf(rules: str, right: list[str], wrong: list[str]) -> None:
    assert error_of(grammar=rules) == ""
    assert all(follows(text, grammar=rules) for text in right) and not any(
        follows(text, grammar=rules) for text in wrong
    )


@pytest.mark.parametrize(
    "rules", ["root ::= 'a'", 'root ::= "a', 'root ::= "\\ud800"', "root ::= nope", 'root ::= "a"\n%import x']
)
def test_grammars_that_cannot_be_read(rules: str) -> None:
    assert "grammar" in error_of(grammar=rules)


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


def test_a_checker_that_was_stopped_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a grammar for which a pipe has no room: writing it would wait for ever."""
    monkeypatch.setattr("stage03_engine.core.features.structured_output.grammar_checker.ANSWER_TIMEOUT", 1.0)
    checker = GrammarChecker(StructuredOutputsConfig())
    try:
        checker.check("choice", '["a"]', 60.0)
        assert checker._process is not None
        stopped = psutil.Process(checker._process.pid)
        stopped.suspend()
        with contextlib.suppress(LostError):  # on a busy machine the next ones, too, may be silent for so long
            checker.check("choice", json.dumps(["\u00e9" * 20_000]), 1.0)
        assert not stopped.is_running()
    finally:
        checker.shutdown()
