"""Reasoning and tool calls in the text of an answer: the same whatever pieces the text comes in."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage02_server.features.tools.answer_parser import AnswerDelta, AnswerParser
from stage02_server.features.tools.reasoning_parsers import DeepSeekR1Parser
from stage02_server.features.tools.tool_parsers import HermesToolParser, NamedToolParser, RequiredToolParser

Result = tuple[str, str, list[tuple[str | None, str]]]
PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<", "<tool", "</", "{", "}", "[", "]", '"', "\\", '"name"', ":", ",",
    ' "f" ', '"arguments"', "{}", "\n", "word ", "é😀", '{"name": "f", "arguments": {"a": "}"}}', '<tool_call>{"name": "g", ',
    '"arguments": {"b": [1, "</tool_call>"]}}', '{"arguments": {}, "name": "h"}',
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just('"\\}{</tool_call>'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), json_values, max_size=3))


def read(parser: Any, pieces: list[str]) -> Result:
    """All that comes of the pieces, put together."""
    total = AnswerDelta()
    for number, piece in enumerate(pieces):
        delta = parser.feed(piece, number == len(pieces) - 1)
        total.reasoning += delta.reasoning
        total.content += delta.content
        for index, call in delta.calls.items():
            assert call.name is None or index not in total.calls, "a name comes once, with the first piece"
            total.add_call(index, call.name, call.arguments)
    assert list(total.calls) == list(range(len(total.calls)))
    return total.reasoning, total.content, [(call.name, call.arguments) for call in total.calls.values()]


def both() -> AnswerParser:
    return AnswerParser(DeepSeekR1Parser(""), HermesToolParser())


@given(text=texts, cuts=st.lists(st.integers(0, 400), max_size=12))
@pytest.mark.parametrize("make", [both, HermesToolParser, RequiredToolParser, lambda: DeepSeekR1Parser("")])
def test_pieces_do_not_matter(make: Any, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(make(), [*pieces, ""]) == read(make(), [text]) == read(make(), [*text, ""])


@given(text=texts.filter(lambda text: "<tool_call>" not in text))
def test_text_without_calls_is_content(text: str) -> None:
    assert read(HermesToolParser(), [*text, ""]) == ("", text, [])


@given(
    before=st.text(max_size=5),
    wanted=st.lists(calls, min_size=1, max_size=3),
    ascii=st.booleans(),
    indent=st.none() | st.just(1),
)
def test_calls_come_back(before: str, wanted: list[Any], ascii: bool, indent: int | None) -> None:
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii, indent=indent)

    written = [dump({"name": name, "arguments": arguments}) for name, arguments in wanted]
    text = before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    _, content, found = read(HermesToolParser(), [*text, ""])
    assert content == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == wanted

    array = dump([{"name": name, "parameters": arguments} for name, arguments in wanted])
    _, content, found = read(RequiredToolParser(), [*array, ""])
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == wanted


ANSWERS: list[tuple[str, str, list[tuple[str, str]]]] = [
    # text, content, calls
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),  # the end tag is missing
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("?", "{}")]),  # half a character
    ('<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}', "", [("f", '{"a": "?"}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),  # cut short: what there is
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 3}</tool_call> x', "x", [("f", '{"a": 1}')]),
    ("<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>", []),
    ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("<tool_call>", "<tool_call>", []),
    ('a<tool_call>b<tool_call>{"name": "f", "arguments": {}}</tool_call>c', "a<tool_call>bc", [("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "found"), ANSWERS)
def test_hermes_table(text: str, content: str, found: list[tuple[str, str]]) -> None:
    assert read(HermesToolParser(), [text]) == ("", content, found)


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesToolParser()
    parser.feed('<tool_call>{"name": "f", "arguments": ', False)
    assert parser.feed('{"text": "to be', False).calls[0].name == "f"
    assert parser.feed(", or not", False).calls[0].arguments == ", or not"


@given(
    text=texts.filter(lambda text: "<think>" not in text),
    begins=st.booleans(),
    prompt=st.sampled_from(["", "<think>\n"]),
)
def test_reasoning_is_what_comes_before_the_tag(text: str, begins: bool, prompt: str) -> None:
    reasoning, _, content = text.partition("</think>")
    found = read(DeepSeekR1Parser(prompt), [*("<think>" * begins + text), ""])
    assert found == (reasoning, content, [])


def test_a_prompt_that_ends_with_the_tag_has_switched_reasoning_off() -> None:
    assert read(DeepSeekR1Parser("...<think>\n\n</think>\n\n"), ["Yes"]) == ("", "Yes", [])


def test_what_the_request_does_not_want_is_left_out() -> None:
    text = "r</think>" + "".join(f'<tool_call>{{"name": "{n}", "arguments": {{}}}}</tool_call>' for n in "fg")
    quiet = AnswerParser(DeepSeekR1Parser(""), HermesToolParser(), include_reasoning=False, parallel=False)
    assert read(quiet, [*text, ""]) == ("", "", [("f", "{}")])
    assert (quiet.num_characters, quiet.num_calls) == (1, 1)


@given(text=st.text(min_size=1))
def test_a_tool_chosen_by_name_has_the_whole_text(text: str) -> None:
    assert read(NamedToolParser("f"), [*text, ""]) == ("", "", [("f", text)])


def test_a_long_answer_takes_no_longer_than_its_length() -> None:
    """Quadratic reading would take minutes."""
    text = (
        "<tool_call>" + "<" * 30_000 + "</tool_call>" + '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 30_000
    )
    _, content, [(name, arguments)] = read(HermesToolParser(), re.findall(".{1,4}", text))
    assert (len(content), name, len(arguments)) == (30_023, "f", 30_007)
    nested = "<tool_call>{" * 30_000
    assert read(HermesToolParser(), [nested, ""]) == ("", nested, [])
    assert read(HermesToolParser(), [nested + "}" * 30_000, ""]) == ("", nested + "}" * 30_000, [])
