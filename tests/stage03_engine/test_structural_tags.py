"""Structural tags: free text until a trigger, then a tag, in both of xgrammar's forms; against a slow reader of the same rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st
from test_grammar_checks import error_of, follows

from stage03_engine.errors import InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
LEGACY = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[[", "schema": {"const": "x"}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}
RESTS = {"<f=": [r"a>([0-9]|[1-9][0-9])</f>", "b>(true|false)</f>"], "[[": [r'"x"\]\]']}
PIECES = [
    "<f=",
    "<f",
    "=",
    "a>",
    "b>",
    "7",
    "true",
    "</f>",
    "[",
    "[[",
    '"x"',
    "]]",
    "x",
    "é",
    "\n",
    "<f=a>42</f>",
    '[["x"]]',
]


def tags(*begins: str, content: Any = None, end: Any = "}") -> list[dict[str, Any]]:
    content = content or {"type": "json_schema", "json_schema": NUMBER}
    return [{"type": "tag", "begin": begin, "content": content, "end": end} for begin in begins]


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **more}}


def is_tagged(text: str) -> bool:
    """The rule in words: nothing else may follow a trigger, wherever it comes first, than the rest of one of its tags."""
    for place in range(len(text) + 1):
        found = [trigger for trigger in RESTS if text[:place].endswith(trigger)]
        if found:
            ends = [match.end() for rest in RESTS[found[0]] if (match := re.match(rest, text[place:]))]
            return any(is_tagged(text[place + end :]) for end in ends)
    return True


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_text_with_tags_in_the_older_form(text: str) -> None:
    assert follows(text, structural_tag=LEGACY, disable_any_whitespace=True) == is_tagged(text)


TRIGGERED = {"triggers": ["{"], "tags": tags("{a", "{b")}
CONTENTS: list[tuple[str, Any, list[str], list[str]]] = [
    # case, structural_tag, what may be an answer, what may not
    ("free text with tags", tagged("triggered_tags", **TRIGGERED), ["", "x", "{a1}", "x{b22}y{a0}"], ["{", "{c1}", "{a1", "{a100}"]),
    ("one at least", tagged("triggered_tags", at_least_one=True, **TRIGGERED), ["{a1}", "x{a1}y"], ["", "x"]),
    ("one at most", tagged("triggered_tags", stop_after_first=True, **TRIGGERED), ["", "x", "x{a1}"], ["{a1}y", "{a1}{a1}"]),
    ("exactly one", tagged("triggered_tags", stop_after_first=True, at_least_one=True, **TRIGGERED), ["x{a1}"], ["", "x", "{a1}{a1}"]),
    ("tags with a separator", tagged("tags_with_separator", tags=tags("{a", "{b"), separator=", "),
     ["", "{a1}", "{a1}, {b2}"], ["{a1}{b2}", "{a1},", "x{a1}"]),
    ("one of them at least", tagged("tags_with_separator", tags=tags("{a"), separator="", at_least_one=True), ["{a1}{a2}"], [""]),
    ("a tag", tagged("tag", begin="<t>", content={"type": "any_text"}, end="</t>"), ["<t></t>", "<t>a</b></t>"], ["<t>a", "<t></t></t>"]),
    ("with several ends", {"format": tags("<t>", content={"type": "any_text"}, end=["!", "?"])[0]}, ["<t>a!", "<t>?"], ["<t>a", "<t>!?"]),
    ("without a type", {"format": {"begin": "(", "content": {"type": "regex", "pattern": "a+"}, "end": ")"}}, ["(aa)"], ["()"]),
    ("all in a row", tagged("sequence", elements=[
        *tags("<think>", content={"type": "any_text"}, end="</think>"), {"type": "const_string", "value": "\n"},
        {"type": "or", "elements": [{"type": "json_schema", "json_schema": NUMBER}, {"type": "regex", "pattern": "yes|no"}]},
     ]), ["<think>a\nb</think>\n12", "<think></think>\nno"], ["12", "<think></think>\n", "<think></think>\nnono"]),
    ("tags in a tag", tagged("tag", begin="<", content={"type": "triggered_tags", **TRIGGERED}, end=">"),
     ["<>", "<a{a1}b>", "<{a1}>"], ["<{>", "<a{a1}b", "<{a1}>x"]),
    ("free text last", tagged("sequence", elements=[{"type": "const_string", "value": "To "}, {"type": "any_text"}]), ["To ", "To be"], ["be"]),
]  # fmt: skip


@pytest.mark.parametrize(("case", "value", "right", "wrong"), CONTENTS, ids=[case for case, *_ in CONTENTS])
def test_the_newer_form(case: str, value: Any, right: list[str], wrong: list[str]) -> None:
    assert error_of(structural_tag=value) == ""
    assert [text for text in right if not follows(text, structural_tag=value)] == []
    assert [text for text in wrong if follows(text, structural_tag=json.dumps(value))] == []


REFUSED: list[tuple[Any, str]] = [
    ({"format": 3}, "an object in format"),
    (tagged("qwen_xml_parameter", json_schema={}), "knows no format 'qwen_xml_parameter'"),
    (tagged("any_text", excludes=["x"]), "excludes"),
    (tagged("triggered_tags", triggers=["{"], tags=tags("x")), "has 0 triggers"),
    (tagged("triggered_tags", triggers=["{", "{a"], tags=tags("{a")), "has 2 triggers"),
    (tagged("triggered_tags", triggers=["{", "["], tags=tags("{a")), "no tag that begins with the trigger '['"),
    (tagged("triggered_tags", triggers=[""], tags=tags("{a")), "none of them empty"),
    (tagged("triggered_tags", triggers=["{"], tags=[]), "needs tags"),
    (tagged("sequence", elements=[{"type": "any_text"}, {"type": "const_string", "value": "x"}]), "free text before other elements"),
    (tagged("tag", begin="x", content={"type": "any_text"}, end=["", "y"]), "nothing would end it"),
    (tagged("tag", begin="x", content={"type": "regex", "pattern": "("}, end="y"), "regular expression"),
    (tagged("tag", begin="x", content={"type": "json_schema", "json_schema": {"type": "nope"}}, end="y"), "nope"),
    (tagged("tag", begin=3, content={"type": "any_text"}, end="y"), "begin"),
    (tagged("tag", begin="x", content={"type": "any_text"}, end=3), "end of each tag"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_its_reason(value: Any, reason: str) -> None:
    error = error_of(structural_tag=value)
    assert reason in error and len(error) < 260 and "\n" not in error


def test_formats_in_formats_have_a_bound() -> None:
    value: Any = {"type": "const_string", "value": "x"}
    for _ in range(40):
        value = {"type": "or", "elements": [value]}
    assert "deep" in error_of(structural_tag={"format": value})
    for wrong in ("[1", "NaN", "x", {}, "[]", {"structures": []}):
        with pytest.raises(InvalidRequestError, match="is not valid JSON|NaN|needs format, or structures and triggers"):
            StructuredOutputsParams(structural_tag=wrong)


def test_a_model_writes_the_tag_and_then_what_it_likes() -> None:
    value = tagged("sequence", elements=[*tags("<n>", end="</n>"), {"type": "any_text"}])
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(structural_tag=value), max_tokens=24, temperature=0
    )
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000) as llm:
        text = llm.generate("ROMEO:", params)[0].outputs[0].text
    assert re.match(r"<n>\s*\d{1,2}\s*</n>.", text, flags=re.DOTALL), text
