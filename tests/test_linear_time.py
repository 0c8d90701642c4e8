"""What reads a client's text, or an answer that a client can steer, takes time in proportion to its length.

The first table holds every regular expression of the four stages and of what records the trace, found in the source: with 100,000 characters
of its worst case, or with the reason why it never meets a client's text. A new expression must be entered.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from server_under_test import byte_config

from stage02_server.features.admin.dev_routes import _response_ids
from stage02_server.features.chat_template.process import _words
from stage02_server.features.hardening.process import ADDRESS
from stage02_server.features.sampling.fields import INTEGER
from stage02_server.features.tools.answer_parser import AnswerParser
from stage02_server.features.tools.call_scanner import _HEAD
from stage02_server.features.tools.fields import ToolParam
from stage02_server.features.tools.pieces import _STEP, pieces
from stage02_server.features.tools.reasoning_parsers import DeepSeekR1Parser, Qwen3Parser
from stage02_server.features.tools.tool_parsers import (
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    NamedToolParser,
    PythonicToolParser,
    Qwen3XmlToolParser,
    RequiredToolParser,
)
from stage02_server.features.traceparent.traceparent import parse_traceparent
from stage02_server.middleware import ACCEPTED_ID
from stage02_server.protocol import RequestId
from stage03_engine.core.features.structured_output.backend_guidance import _describe
from stage03_engine.core.features.structured_output.lark import _escape, _rust_regex
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.features.engine_watch import _ID as ID_IN_EVENT
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stagetrace.ids import is_beam, root_of
from stagetrace.terminal import folded

ROOT = Path(__file__).parent.parent
FUNCTIONS = {"compile", "search", "match", "sub", "subn", "fullmatch", "split", "findall", "finditer"}
SIZE = 100_000  # characters


def refused(work: Callable[[], Any]) -> None:
    """Do it; a refusal is as good as a result."""
    try:
        work()
    except (ValueError, ValidationError, InvalidRequestError):
        pass


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    refused(work)
    return time.thread_time() - start


def in_eighty_columns(text: str) -> str:
    """A line of the log, as a terminal gets it."""
    return folded(text, 80)


def assert_linear(make: Callable[[int], Callable[[], Any]], size: int = SIZE) -> None:
    """Four times the size takes four times the CPU time, give or take; it would be 16 times with quadratic work. Noise may hide it:
    each of several measurements must look worse than linear."""
    for _ in range(6):
        small, large = cpu_seconds(make(size // 4)), cpu_seconds(make(size))
        if large < 8 * small + 0.02:
            return
    raise AssertionError(f"{size // 4}: {small:.3f} s, {size}: {large:.3f} s")


# Regular expressions


def expressions() -> Iterator[str]:
    """Each expression as "file: source of the pattern"."""
    files = [path for stage in sorted(ROOT.glob("stage0*")) for path in sorted(stage.rglob("*.py"))]
    for path in [*files, *sorted((ROOT / "trace/stagetrace").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.module != "re", (
                "write re.compile: this test looks for it"
            )
            if not isinstance(node, ast.Call):
                continue
            patterns = [keyword.value for keyword in node.keywords if keyword.arg == "pattern"]  # of pydantic
            function = node.func
            if (
                isinstance(function, ast.Attribute)
                and ast.unparse(function.value) == "re"
                and function.attr in FUNCTIONS
            ):
                patterns.append(node.args[0])
            for pattern in patterns:
                text = ast.literal_eval(pattern) if isinstance(pattern, ast.Constant) else ast.unparse(pattern)
                yield f"{path.relative_to(ROOT)}: {text}"


LARK = "stage03_engine/core/features/structured_output/lark.py: "
TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
MEETS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    # expression: (what uses it, beginnings, repeated parts and ends of its worst cases)
    r"stage02_server/features/hardening/process.py: [0-9A-Fa-f.:%\[\]]*": (ADDRESS.fullmatch, ["*1*", "*1*!"]),
    r"stage02_server/features/admin/dev_routes.py: -[0-9a-f]{8}\Z": (_response_ids, ["*-0123456*-1", "*-*-1", "*0123456789*-1"]),
    "stage02_server/features/chat_template/process.py:  at 0x[0-9a-fA-F]+": (
        lambda text: _words(ValueError(text)), ["* at 0x*", " at 0x*f*", "* *"]),
    r"stage02_server/features/sampling/fields.py: \s*[+-]?\d{1,19}\s*": (
        INTEGER.fullmatch, ["* *", "*1*", "* *x", "1* *x", "+" + "1" * 19 + "* *x"]),
    r"stage02_server/features/tools/pieces.py: [\w\s]+|.": (_STEP.findall, ["*a*", "*.*", "* .*", "*a\n*."]),
    r"""stage02_server/features/tools/call_scanner.py: \s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*""": (
        _HEAD.fullmatch, ["* *", "{* *", '{"type"* *', '{"type":* *', '{"type":"function"* *', '{"type":"function",* *', '{"name":* *', '{"name":"*a*', '{"name":"*\\*', '{"name":"*\\"*', '{"name":"a"* *', '{"name":"a",* *x',
                          '{"name":"a","arguments":* *x']),
    "stage02_server/features/traceparent/traceparent.py: ([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}": (
        lambda text: parse_traceparent([text]), ["*0*", "00-*a*"]),
    "stage02_server/features/traceparent/traceparent.py: _VERSION_00.pattern + '(-.*)?'": (
        lambda text: parse_traceparent([text]), [TRACEPARENT + "*-*", TRACEPARENT + "-*a*\n", "01" + TRACEPARENT[2:] + "*-*"]),
    "stage02_server/middleware.py: [A-Za-z0-9._:-]{1,128}": (ACCEPTED_ID.fullmatch, ["*a*", "*a*!"]),
    "stage02_server/protocol.py: f'^{ACCEPTED_ID.pattern}$'": (TypeAdapter(RequestId).validate_python, ["*a*", "*a*!"]),
    r"stage03_engine/core/features/structured_output/backend_guidance.py: ^(at )?\d+\(\d+\): ": (
        _describe, ["*1*", "at 1(*1*", "*at *", "*1(1): *", "*\n1*"]),
    LARK + r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{,(?=\d+\}))": (
        _rust_regex, ["*[*", "*[^*", "*[]*", "*[a]*", "*[*\\", "[*\\*", "*\\*", "*{,*", "{,*1*", "*{,1*"]),
    LARK + r"\[|&&|--|~~": (_rust_regex, ["[*&*]", "[*-a*]", "*[&]*"]),
    LARK + r"\\.": (_rust_regex, ["[*\\a*]", "[*\\*"]),
    LARK + r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))": (
        lambda text: re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", _escape, text), ["*\\*", "*\\u*", "*\\U1234567*", "*\\u0041*", "*\\\n*"]),
    """stage03_engine/frontend/features/engine_watch.py: b'"(req|first|needed_by)":"([^"]+)"'""": (
        lambda text: ID_IN_EVENT.findall(text.encode()), ['*"req":"*', '"req":"*a*', '*"req":"a*', '*"first":"a"*']),
    r"trace/stagetrace/ids.py: (?:\d+|beam\d+\.\d+)_": (root_of, ["*1*", "beam*1*", "beam1.*1*", "*1_*"]),
    r"trace/stagetrace/ids.py: f'({KIND}.+)-\\d+'": (root_of, ["cmpl-*-1*x", "cmpl-*-*", "cmpl-a-*1*x", "*cmpl-*"]),
    r"trace/stagetrace/ids.py: beam\d+\.\d+_": (is_beam, ["beam*1*", "beam1.*1*", "*beam1.*"]),
    r"trace/stagetrace/terminal.py: \x1b\[[0-9;]*m": (in_eighty_columns, ["*\x1b[*", "\x1b[*1*", "*\x1b[0m*"]),
    "trace/stagetrace/terminal.py:  +|[^ ]+": (in_eighty_columns, ["*a *", "* *", "*a*", "*a  *"]),
    "trace/stagetrace/terminal.py: (?<=[^ ])  +": (in_eighty_columns, ["a* *", "*a  *"]),
}  # fmt: skip
MODEL, FLAGS, COMPILER = (
    "names in a checkpoint or a vocabulary",
    "flags, variables and our own files",
    "what a compiler of kernels wrote",
)
NEVER: dict[str, str] = {  # the beginning of a line of `expressions`: what it meets instead
    "stage01_cli/tools/book/": FLAGS,
    "stage01_cli/tools/course/": FLAGS,
    r"stage02_server/features/audio/serving.py: <\|([a-z]{2,3})\|>": MODEL,
    "stage02_server/features/dry_run/memory.py: ": MODEL,
    "stage03_engine/core/features/quantized_checkpoints/": MODEL,
    "stage03_engine/args/": FLAGS,
    "stage03_engine/core/features/cpu_binding/manifest.py: ": FLAGS,
    "stage03_engine/core/features/debug/layer_trace.py: ": MODEL,
    "stage03_engine/core/features/lora/adapter.py: ": MODEL,
    "stage03_engine/core/features/distributed/stages.py: ": MODEL,
    "stage03_engine/core/features/load_formats/sharded_state.py: ": MODEL,
    "stage03_engine/core/models/gpt2.py: ": MODEL,
    "stage03_engine/frontend/features/data_parallel/devices.py: ": FLAGS,
    "stage03_engine/frontend/features/dead_folders/dead_folders.py: ": FLAGS,
    "stage03_engine/frontend/features/sentencepiece/sentencepiece.py: <0x([0-9A-Fa-f]{2})>": MODEL,
    "stage04_kernels/lab/compile.py: ": COMPILER,
    "trace/stagetrace/redact.py: ": FLAGS,
}


def text_of(worst: str, size: int) -> str:
    """ "a*b*c" -> "abbbc", as long as `size`."""
    begin, part, end = worst.split("*")
    return begin + part * (size // len(part)) + end


def test_every_regular_expression_is_in_the_table() -> None:
    found = set(expressions())
    unknown = {one for one in found - MEETS.keys() if not one.startswith(tuple(NEVER))}
    assert not unknown, (
        "enter it in MEETS with its worst case, or in NEVER with what it meets instead of a client's text"
    )
    assert MEETS.keys() <= found, MEETS.keys() - found
    assert all(any(one.startswith(begin) for one in found) for begin in NEVER)


@pytest.mark.parametrize(
    ("use", "worst"),
    [
        pytest.param(use, worst, id=f"{name[-40:]} {worst[:20]!r}")
        for name, (use, cases) in MEETS.items()
        for worst in cases
    ],
)
def test_a_regular_expression_is_linear(use: Callable[[str], Any], worst: str) -> None:
    def make(size: int) -> Callable[[], Any]:
        text = text_of(worst, size)
        return lambda: use(text)

    assert_linear(make)


def test_the_measure_sees_a_quadratic_expression() -> None:
    """It doubts in favour of the expression: one noisy measurement of six is enough. So on a busy machine it may have to look again."""
    for _ in range(10):
        try:  # far above the 0.02 s that are forgiven
            assert_linear(lambda size: lambda: re.search(r"^\s*root\s*::=", "\n" * size, re.MULTILINE), 8_000)
        except AssertionError as error:
            assert "2000" in str(error)
            return
    pytest.fail("never seen")


# Answers

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
ANSWERS = [
    "*a*", "*.*", "* *", "*<*", "*<think>*", "<think>* *", "<think>*</*", "*<tool_call>*", "*<tool_call>x*", "<tool_call>* *",
    "<tool_call>*{*", "<tool_call>*[*", '<tool_call>{"name":* *{', '<tool_call>{"name": "*\\"{*', '<tool_call>{"name": "*{*', '<tool_call>{"a": *{}, *',
    '<tool_call>{"name": "f", "arguments": {"a": "*b*', '<tool_call>{"name": "f", "arguments": {*"a": 1, *', f"*{CALL}*", f"{CALL}* *", f"*x{CALL}*",
    "*[*", '[*{"name": "f", "parameters": {}}, *', "[{*{*", "* {*",
]  # fmt: skip


def parser_for(worst: str) -> AnswerParser:
    required = worst[0] == "[" or worst[1] == "["
    return (
        AnswerParser(None, RequiredToolParser()) if required else AnswerParser(DeepSeekR1Parser(""), HermesToolParser())
    )


THING = ToolParam.model_validate({"function": {"name": "f", "parameters": {"properties": {"t": {"type": "object"}}}}})
FORMATS: dict[str, tuple[Callable[[], AnswerParser], list[str]]] = {
    "llama3_json": (lambda: AnswerParser(None, Llama3JsonToolParser()), [
        "*{*", "*{}*", "{*{*", '{"*a*', '{"*\\"*', '{"a": *{}, *', "*;*", "*<|python_tag|>*", "*<*", '*{"name": "f", "parameters": {}};*',
        '{"type": "function", "name": "f", "parameters": {"a": "*b*']),
    "mistral": (lambda: AnswerParser(None, MistralToolParser()), [
        "*[TOOL_CALLS]*", "[TOOL_CALLS]* *", "[TOOL_CALLS]*a*{", "[TOOL_CALLS]*[*", '[TOOL_CALLS][*{"name": "f"}, *', "*[TOOL_CALLS]f{}*", "[TOOL_CALLS]f*{*",
        '[TOOL_CALLS]f{"*\\"*', "*[TOOL_CALLS]f{*", "*[TOOL*"]),
    "pythonic": (lambda: AnswerParser(None, PythonicToolParser()), [
        "*[*", "*[f(*", "[f(*a=1, *", "[f(a=*[*", "[f(a=[*1,*", "[f(a='*\\n*", "[f(a='*\\x41*", "[f(a='*\\N{BULLET}*", "[f(a='''*'x*", "[f(a=*1*", "[*a*(",
        "[*f(),*", "[f(*a=' ',*", "[* *", "*[f(a=b)]*", "[f(a={*1:1,*"]),
    "qwen3_xml": (lambda: AnswerParser(Qwen3Parser(""), Qwen3XmlToolParser.for_tools([THING])), [
        "*<tool_call>*", "<tool_call>* *", "*<function=*", "<function=*a*", "<function=f>*<*", "*<function=f>*", "<function=f>*<parameter=*", "<function=f><parameter=*a*",
        "<function=f>*<parameter=a>*", "<function=f><parameter=a>*\n*", "<function=f><parameter=a>*</*", "<function=f><parameter=t>*[*</parameter>",
        "<function=f><parameter=t>*[],*</parameter>", "<function=f><parameter=t>*\n*</parameter>", "<function=f>*<parameter=t>1</parameter>*"]),
}  # fmt: skip


def whole(make: Callable[[], AnswerParser], worst: str) -> Callable[[int], Callable[[], Any]]:
    def prepare(size: int) -> Callable[[], Any]:
        text, parser = text_of(worst, size), make()
        return lambda: parser.feed(text, True)

    return prepare


def streamed(make: Callable[[], AnswerParser], worst: str) -> Callable[[int], Callable[[], Any]]:
    """A character at a time."""

    def prepare(size: int) -> Callable[[], Any]:
        text, parser = text_of(worst, size), make()
        return lambda: [parser.feed(char, False) for char in text] + [parser.feed("", True)]

    return prepare


@pytest.mark.parametrize("size", [10_000, pytest.param(SIZE, marks=pytest.mark.long)])
@pytest.mark.parametrize("worst", ANSWERS)
def test_an_answer_is_parsed_in_linear_time(worst: str, size: int) -> None:
    assert_linear(whole(lambda: parser_for(worst), worst), SIZE)
    assert_linear(streamed(lambda: parser_for(worst), worst), size)


@pytest.mark.parametrize(("name", "worst"), [(name, worst) for name, (_, cases) in FORMATS.items() for worst in cases])
def test_every_format_is_parsed_in_linear_time(name: str, worst: str) -> None:
    assert_linear(whole(FORMATS[name][0], worst), 40_000)
    assert_linear(streamed(FORMATS[name][0], worst), 10_000)


def test_the_pieces_of_an_answer_are_put_together_in_linear_time() -> None:
    def make(size: int) -> Callable[[], Any]:
        return lambda: pieces(AnswerParser(None, NamedToolParser("f")), "." * size, True)

    assert_linear(make, 20_000)


# The front end, token by token


@pytest.mark.parametrize(
    "stops",
    [["b" * 1024], ["a" * 1023 + end for end in "bcde"], ["ab" * 511 + end for end in "cdef"]],
    ids=["b", "aab", "abc"],
)
@pytest.mark.parametrize("pattern", ["a", "ab", "a" * 1022 + "c"], ids=["a", "ab", "a..c"])
def test_long_stop_strings_cost_little_more_than_none(stops: list[str], pattern: str) -> None:
    """A token costs microseconds: it takes a millisecond to try all that the last 1,023 characters could become."""
    tokenizer = init_tokenizer_from_configs(byte_config())
    tokens = tokenizer.encode(text_of(f"*{pattern}*", 4000), add_special_tokens=False)

    def seconds(stops: list[str]) -> float:
        text = IncrementalDetokenizer(tokenizer, SamplingParams(stop=stops, max_tokens=len(tokens)))
        return cpu_seconds(lambda: [(text.update([token]), text.next_text(True)) for token in tokens])

    assert any(seconds(stops) < 30 * seconds([]) + 0.01 for _ in range(3))


# Grammars, in the API process


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"choice": ["a" * 100] * n}, lambda n: {"choice": ["a"] * n}, lambda n: {"json": {"enum": ["a" * 100] * n}},
        lambda n: {"json": {"a" * 100 + str(i): {} for i in range(n)}}, lambda n: {"json": {"title": "é\n" * 50 * n}}, lambda n: {"json": "[" * n},
        lambda n: {"json": '{"enum":[' + "[]," * (n // 5) + "0]}"}, lambda n: {"regex": "[aŁӀ]" * n}, lambda n: {"grammar": "\n" * (n // 2) + "root ::= x"},
        lambda n: {"grammar": "root\n" * n}, lambda n: {"grammar": "::=" * (n // 5)}, lambda n: {"regex": "\ud800" * n},
    ],
)  # fmt: skip
def test_a_grammar_is_checked_in_linear_time(make: Callable[[int], dict[str, Any]]) -> None:
    def check(size: int) -> Callable[[], Any]:
        fields = make(size)
        return lambda: StructuredOutputsParams(**fields)

    assert_linear(check)


def test_what_is_too_long_is_not_even_written_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_text(*value: Any, **how: Any) -> str:
        raise AssertionError("written")

    monkeypatch.setattr("stage03_engine.params.structured_outputs.json.dumps", no_text)
    for long in (
        {"choice": ["a" * 100] * 65_000},
        {"json": {"enum": ["a" * 100] * 65_000}},
        {"json": {"a": {"b": "c" * 65_537}}},
    ):
        with pytest.raises(InvalidRequestError, match="65536"):
            StructuredOutputsParams(**long)
