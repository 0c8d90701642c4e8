"""How other models than Hermes write calls: every format has to give back the same calls, whatever pieces the text comes in."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from test_answer_parsers import json_values, read

from stage02_server.features.tools import parameter_types as parameter_types_module
from stage02_server.features.tools.answer_parser import AnswerParser
from stage02_server.features.tools.call_scanner import CallScanner
from stage02_server.features.tools.fields import ToolParam
from stage02_server.features.tools.pieces import pieces
from stage02_server.features.tools.python_literals import MAX_DEPTH, python_json
from stage02_server.features.tools.reasoning_parsers import Qwen3Parser
from stage02_server.features.tools.tool_parsers import (
    TOOL_PARSERS,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    PythonicToolParser,
    Qwen3XmlToolParser,
)

Call = tuple[str, dict[str, Any]]
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"}, "yes": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "either": {"type": ["integer", "null"]}, "list": {"$ref": "#/$defs/list"},
    "thing": {"type": "object"}, "size": {"enum": [1, 2]}, "odd": 7,
}  # fmt: skip
TOOL = {
    "name": "f",
    "parameters": {"type": "object", "properties": PROPERTIES, "$defs": {"list": {"type": "array"}}},
}


def qwen3() -> Qwen3XmlToolParser:
    return Qwen3XmlToolParser.for_tools([ToolParam.model_validate({"function": TOOL})])


# The same calls in every format

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
arguments = st.dictionaries(names, json_values, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
between = st.sampled_from(["", "\n", "; ", " ;\n"])


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_python(call: Call) -> str:
    name, values = call
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def in_llama(wanted: list[Call], tag: str) -> str:
    return tag + "; ".join(dump({"name": name, "parameters": values}) for name, values in wanted)


FORMATS: dict[str, tuple[Callable[[], Any], Callable[[list[Call]], str]]] = {
    "hermes": (HermesToolParser, lambda wanted: "\n".join(f"<tool_call>{dump({'name': n, 'arguments': a})}</tool_call>" for n, a in wanted)),
    "llama3_json": (Llama3JsonToolParser, lambda wanted: in_llama(wanted, "")),
    "llama3_json, tagged": (Llama3JsonToolParser, lambda wanted: in_llama(wanted, "<|python_tag|>")),
    "llama3_json, typed": (Llama3JsonToolParser, lambda wanted: "".join(dump({"type": "function", "name": n, "parameters": a}) for n, a in wanted)),
    "mistral": (MistralToolParser, lambda wanted: "[TOOL_CALLS]" + dump([{"name": n, "arguments": a} for n, a in wanted])),
    "mistral, version 11": (MistralToolParser, lambda wanted: "".join(f"[TOOL_CALLS]{n}{dump(a)}" for n, a in wanted)),
    "mistral, with marks": (MistralToolParser, lambda wanted: " ".join(f"[TOOL_CALLS]{n}[CALL_ID]a1[ARGS]{dump(a)}" for n, a in wanted)),
    "pythonic": (PythonicToolParser, lambda wanted: f"[{', '.join(map(in_python, wanted))}]"),
    "pythonic, with commas": (PythonicToolParser, lambda wanted: "[ " + "".join(in_python(call) + " ,\n" for call in wanted) + "]"),
}  # fmt: skip


@given(before=st.text("ab \n.", max_size=5), wanted=calls, after=st.sampled_from(["", "So.", "So, [1] {2} <3>"]))
@pytest.mark.parametrize("name", FORMATS)
def test_calls_come_back(name: str, before: str, wanted: list[Call], after: str) -> None:
    make, write = FORMATS[name]
    text = before + write(wanted) + after
    whole = read(make(), [text])
    assert whole == read(make(), [*text, ""])
    _, content, found = whole
    assert content == before + after
    assert [(name, json.loads(arguments)) for name, arguments in found] == wanted


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=8)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "text": texts, "other": texts, "count": st.integers(), "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        "yes": st.booleans(), "maybe": st.none() | texts.filter(lambda text: text.strip().lower() not in ("null", "none")),
        "either": st.none() | st.integers(), "list": st.lists(json_values, max_size=3), "thing": st.dictionaries(st.text(max_size=3), json_values, max_size=3),
        "size": st.sampled_from([1, 2]), "odd": texts,
    },
)  # fmt: skip


@given(wanted=st.lists(parameters, min_size=1, max_size=3), python=st.booleans(), tagged=st.booleans())
def test_qwen3_values_have_the_types_of_the_schema(wanted: list[dict[str, Any]], python: bool, tagged: bool) -> None:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"\n{given}\n"  # both line breaks are the format's
        return f"\n{given!r}\n" if python else dump(given)

    text = "So:\n\n"
    for one in wanted:
        parts = "".join(f"<parameter={key}>{value(given)}</parameter>\n" for key, given in one.items())
        text += f"{'<tool_call>' * tagged}\n<function=f>\n{parts}</function>\n{'</tool_call>' * tagged}\n"
    if not tagged:
        text = text.replace("So:\n\n\n", "So:\n\n")
    whole = read(qwen3(), [text])
    assert whole == read(qwen3(), [*text, ""])
    _, content, found = whole
    assert content == "So:\n\n" and [(name, json.loads(given)) for name, given in found] == [
        ("f", one) for one in wanted
    ]


# Any text, in any pieces

PIECES: dict[Callable[[], Any], list[str]] = {
    Llama3JsonToolParser: ["<|python_tag|>", "<|pyth", "{", "}", '{"name": "f", ', '"parameters": {', '"a": "}"}}', ";", " ", "x", '"', "[", ",", ":"],
    MistralToolParser: ["[TOOL_CALLS]", "[TOOL", "[", "]", "[ARGS]", "[CALL_ID]", "f", " ", "{", "}", '{"name": "f", "arguments": {"a": 1}}', '{"a": 1}', ",", "x" * 99, '"', "é"],
    PythonicToolParser: ["[", "]", "f(", "a=", "b = ", "1", "-1.5", "'", '"', "'''", "\\", "\\n", "\\x4", "1", "\\u00e9", "\\N{BULLET}", "{", "}", ":", ",", ", ", ")", "True", "None", "x", " ", "\n", "é", "[f(a=1), "],
    qwen3: ["<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=", "text>", "count>", "thing>", "</parameter>", "\n", "5", "{", "}", "'a': 1", "null", "x", "<", "</", "<function=f>\n<parameter=text>\n", '"'],
    lambda: Qwen3Parser(""): ["<think>", "</think>", "<tool_call>", "<", "</", "<t", "x", " ", "\n"],
}  # fmt: skip


@given(data=st.data(), cuts=st.lists(st.integers(0, 200), max_size=8))
@pytest.mark.parametrize("make", PIECES)
def test_pieces_do_not_matter(make: Callable[[], Any], data: st.DataObject, cuts: list[int]) -> None:
    text = data.draw(st.lists(st.sampled_from(PIECES[make]), max_size=14).map("".join))
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = [text[a:b] for a, b in pairwise(places)]
    whole = read(make(), [text])
    assert read(make(), [*found, ""]) == whole == read(make(), [*text, ""])
    reasoning, content, told = whole
    if not told and "think" not in text:
        assert reasoning + content == text, "something is lost"
    items = pieces(AnswerParser(None, make()), text, True)  # as the Responses and the Messages API get them
    assert "".join(item.text for item in items if item.kind == "content") == content


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{"), max_size=20))
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_text_without_a_beginning_is_content_at_once(name: str, text: str) -> None:
    assert TOOL_PARSERS[name]().feed(text, False).content == text


ANSWERS: list[tuple[Callable[[], Any], str, str, list[tuple[str, str]]]] = [
    # format, text, content, calls
    (Llama3JsonToolParser, 'see {x}, {"name": "Bob"}', 'see {x}, {"name": "Bob"}', []),
    (Llama3JsonToolParser, '{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    (Llama3JsonToolParser, '{"name": "f", "parameters": {"a": 1', "", [("f", '{"a": 1')]),  # cut short: what there is
    (Llama3JsonToolParser, '{"name": "f", "para', '{"name": "f", "para', []),
    (Llama3JsonToolParser, '{"name": "\\ud800", "parameters": {}}', "", [("?", "{}")]),  # half a character
    (Llama3JsonToolParser, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (Llama3JsonToolParser, 'Set {a, then {"name": "f", "parameters": {}}', "Set {a, then ", [("f", "{}")]),
    (MistralToolParser, "[TOOL_CALLS] I cannot {", "[TOOL_CALLS] I cannot {", []),
    (MistralToolParser, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MistralToolParser, "[TOOL_CALLS]" + "x" * 300 + "{}", "[TOOL_CALLS]" + "x" * 300 + "{}", []),
    (MistralToolParser, '[TOOL_CALLS]f{"a": "}"', "", [("f", '{"a": "}"')]),
    (MistralToolParser, '[TOOL_CALLS][{"name": "f"}, x', "x", [("f", "{}")]),
    (MistralToolParser, "[TOOL_CALLS]f{}{}", "{}", [("f", "{}")]),
    (PythonicToolParser, "[1], [a](b), [f(x)], [f(a=b)], [f(a=1j)]", "[1], [a](b), [f(x)], [f(a=b)], [f(a=1j)]", []),
    (PythonicToolParser, "[f(a=1e999)] [f(a=f())] [f(**{})] []", "[f(a=1e999)] [f(a=f())] [f(**{})] []", []),
    (PythonicToolParser, "[f(), g(x)] y", "g(x)] y", [("f", "{}")]),
    (PythonicToolParser, "[f(a=1, b=c)]", " b=c)]", [("f", '{"a": 1')]),
    (PythonicToolParser, "[f(a='b", "", [("f", '{"a": "b')]),
    (PythonicToolParser, '[f(a="\\ud800", b={1: [], },)]', "", [("f", '{"a": "?", "b": {"1": []}}')]),
    (PythonicToolParser, "[f(a='''x\n'y''', b='it\\'s', c='\\x41\\N{BULLET}')]", "", [("f", '{"a": "x\\n\'y", "b": "it\'s", "c": "A•"}')]),
    (PythonicToolParser, "[f(a='x\ny')]", "y')]", [("f", '{"a": "x')]),  # a line break needs three quotes
    (qwen3, "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    (qwen3, "<tool_call><function=a b>", "<tool_call><function=a b>", []),
    (qwen3, "<function=g></function></tool_call> x", "x", [("g", "{}")]),
    (qwen3, "<function=f><parameter=text>a<parameter=count>3</function>", "", [("f", '{"text": "a", "count": 3}')]),
    (qwen3, "<function=f><parameter=count>3.0</parameter></tool_call>", "", [("f", '{"count": "3.0"}')]),
    (qwen3, "<function=f><parameter=text>null</parameter><parameter=maybe>None</parameter></function>", "", [("f", '{"text": "null", "maybe": null}')]),
    (qwen3, "<function=f><parameter=share>NaN</parameter><parameter=yes>True</parameter></function>", "", [("f", '{"share": "NaN", "yes": true}')]),
    (qwen3, "<function=f><parameter=text>\nab\n</par", "", [("f", '{"text": "ab\\n</par')]),
    (qwen3, "<function=f><tool_call><function=g></function>", "", [("f", "{}"), ("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "text", "content", "found"), ANSWERS, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_table(make: Callable[[], Any], text: str, content: str, found: list[tuple[str, str]]) -> None:
    assert read(make(), [text]) == ("", content, found)


BEGUN = {
    Llama3JsonToolParser: '{"name": "f", "parameters": {"text": "to be',
    MistralToolParser: '[TOOL_CALLS]f{"text": "to be',
    PythonicToolParser: "[f(text='to be",
    qwen3: "<tool_call><function=f><parameter=text>to be",
}


@pytest.mark.parametrize("make", BEGUN)
def test_arguments_come_while_they_are_written(make: Callable[[], Any]) -> None:
    parser = make()
    call = parser.feed(BEGUN[make], False).calls[0]
    assert (call.name, call.arguments) == ("f", '{"text": "to be')
    assert parser.feed(", or not", False).calls[0].arguments == ", or not"


# Values in Python


@given(value=json_values)
def test_python_values(value: Any) -> None:
    assert json.loads(python_json(repr(value)) or "") == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "1 2", "[1", "[1}", "{1}", "(1)", "[,]", "'a' 'b'", "r'a'", "f'{a}'", "'\\xg0'", "1+1", "1j", "()", "{'a': }", "-", "0x", "9" * 129, "[" * (MAX_DEPTH + 1), "'\\N{no such}'"],
)  # fmt: skip
def test_what_is_no_value(text: str) -> None:
    assert python_json(text) is None


def test_depth_and_length_have_no_bad_ends() -> None:
    """Python's own parser gives up on nesting, and numbers of many digits take it long."""
    assert json.loads(python_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) or "")
    text = "[f(a='" + "b" * 200_000 + "', c=[" + "1, " * 50_000 + "])]"
    parser = AnswerParser(None, PythonicToolParser())
    [(name, found)] = read(parser, [text])[2]
    assert name == "f" and len(json.loads(found)["a"]) == 200_000 and len(json.loads(found)["c"]) == 50_000


# Reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes", "Hm.", "Yes"),
        ("Hm.<tool_call>x</think>", "Hm.", "<tool_call>x</think>"),  # what calls a tool has thought enough
        ("<think>Hm. <tool", "Hm. <tool", ""),
        ("<tool_call>x", "", "<tool_call>x"),
    ],
)
def test_qwen3_reasoning(text: str, reasoning: str, content: str) -> None:
    assert read(Qwen3Parser(""), [*text, ""]) == (reasoning, content, [])
    assert read(Qwen3Parser("<think>\n\n</think>\n\n"), [*text, ""]) == ("", text, [])


def test_qwen3_reasons_and_calls() -> None:
    text = "<think>\nHm.<tool_call>\n<function=f>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
    assert read(AnswerParser(Qwen3Parser(""), qwen3()), [*text, ""]) == ("\nHm.", "", [("f", '{"count": 3}')])


@pytest.mark.parametrize("text", [r"'\d+\.\w'", r"'\0x'", r"'\101\1019'", r"'\07'", r"'\8'", r"'\q\'\z'", r"'''a\"b\
c'''", r"'\0'"])  # fmt: skip
def test_escapes_are_pythons(text: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know, and keeps
        assert json.loads(python_json(text) or "") == ast.literal_eval(text)


def test_no_text_of_a_model_makes_python_warn() -> None:
    with warnings.catch_warnings(action="error"):
        assert python_json("1if") is None and python_json("0x1for") is None


def test_numbers_that_json_cannot_hold_make_no_call() -> None:
    for number in ("1e999", "NaN", "-Infinity"):
        scanner = CallScanner()
        scanner.feed('{"arguments": {"a": ' + number + '}, "name": "f"}')
        assert scanner.broken, number


def test_a_long_definition_is_read_once_however_many_refer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = parameter_types_module._named
    monkeypatch.setattr(parameter_types_module, "_named", lambda part: seen.append(id(part)) or real(part))
    properties = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/x"}] * 50} for i in range(20)}
    schema = {"$defs": {"x": {"enum": [0, None, "a"]}}, "properties": properties}
    types = parameter_types_module.parameter_types(
        [ToolParam.model_validate({"function": {"name": "f", "parameters": schema}})]
    )
    assert set(types["f"].values()) == {frozenset({"integer", "null", "string"})}
    assert len(seen) == len(set(seen)) <= 21
