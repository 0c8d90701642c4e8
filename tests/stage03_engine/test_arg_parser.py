"""The parser and the flags that are derived from dataclass fields."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage03_engine.arg_utils import EngineArgs, engine_settings
from stage03_engine.args.fields import add_flags, parse_int, settings_of
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.config import SECTIONS, internal, option
from stage03_engine.errors import ConfigError


def engine_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(prog="test")
    parser.add_argument("model_tag", nargs="?")
    EngineArgs.add_cli_args(parser)
    return parser


PARSER = engine_parser()
SETTINGS = engine_settings()
TEXT_OF = {int: "3", float: "0.5", str: "x"}


def example(setting: Any) -> str:
    return setting.choices[0] if setting.choices else TEXT_OF[setting.kind]


VALUED = [s for s in SETTINGS if s.kind in TEXT_OF]


@given(st.sampled_from(VALUED), st.data())
def test_underscores_and_dashes_are_the_same(setting: Any, data: st.DataObject) -> None:
    letters = [data.draw(st.sampled_from("-_")) if c == "_" else c for c in setting.name]
    flag, value = "--" + "".join(letters), example(setting)
    words = [f"{flag}={value}"] if data.draw(st.booleans()) else [flag, value]
    assert PARSER.parse_args(words) == PARSER.parse_args([setting.flag, value])


def test_underscores_in_values_and_after_a_bare_dash_dash_stay() -> None:
    assert PARSER.parse_args(["--model=my_model"]).model == "my_model"
    assert PARSER.parse_args(["--", "--my_model"]).model_tag == "--my_model"


@given(st.lists(st.sampled_from(VALUED), unique=True, max_size=5), st.integers(0, 5))
def test_the_model_tag_may_stand_anywhere(settings: list[Any], place: int) -> None:
    chunks = [[s.flag, example(s)] for s in settings]
    chunks.insert(min(place, len(chunks)), ["gpt2"])
    args = PARSER.parse_args([word for chunk in chunks for word in chunk])
    assert args.model_tag == "gpt2"
    assert {s.name for s in settings} <= vars(args).keys()


@given(st.sampled_from([setting for setting in SETTINGS if "built" not in setting.help]), st.data())
def test_a_flag_with_a_letter_missing_is_guessed(setting: Any, data: st.DataObject) -> None:
    gap = data.draw(st.integers(2, len(setting.flag) - 1))
    typo = setting.flag[:gap] + setting.flag[gap + 1 :]
    with pytest.raises(ConfigError, match=f"^unknown flag {typo}; did you mean {setting.flag}\\?$"):
        PARSER.parse_args([typo, "1"])


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(ConfigError, match="unknown flag --max-model; did you mean --max-model-len"):
        PARSER.parse_args(["--max-model", "5"])


def test_an_unknown_flag_of_a_subcommand_is_guessed_too() -> None:
    parser = FlexibleArgumentParser(prog="test")
    EngineArgs.add_cli_args(parser.add_subparsers().add_parser("serve"))
    with pytest.raises(ConfigError, match="did you mean --block-size"):
        parser.parse_args(["serve", "--blok_size=4"])


@given(st.lists(st.text(max_size=8) | st.sampled_from([s.flag for s in SETTINGS]), max_size=6))
def test_whatever_is_typed_is_parsed_or_refused_in_one_line(words: list[str]) -> None:
    try:
        PARSER.parse_args(words)
    except ConfigError as error:
        assert str(error)
    except SystemExit as end:  # -h prints the help
        assert end.code == 0


SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@given(st.integers(-(10**6), 10**6), st.sampled_from(["", *SUFFIXES]))
def test_integers_with_suffix(number: int, suffix: str) -> None:
    assert parse_int(f"{number}{suffix}") == number * SUFFIXES.get(suffix, 1)


@pytest.mark.parametrize("text, value", [("1.5k", 1500), ("25.6k", 25600), ("0.5m", 500_000)])
def test_decimal_suffixes_take_fractions(text: str, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "1.5K", "1.0001k", "1e3", "0x10", "k", "1kk", "١٢", "nan", "inf"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        parse_int(text)


@dataclass(frozen=True)
class Example:
    """An example section.

    Not shown in the help.
    """

    count: int = option(3, "a count of 100%")
    share: float = option(0.5, "a share")
    names: tuple[str, ...] | None = option(None, "names")
    extra: dict[str, Any] | None = option(None, "extra")
    kind: str = option("a", "kind", ("a", "b"))
    enable_it: bool = option(True, "it")
    limit: int | None = option(None, "limit")
    computed: str | None = internal(None)


def example_parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog="test")
    add_flags(parser, Example)
    return parser


@pytest.mark.parametrize(
    "words, name, value",
    [
        (["--count", "2k"], "count", 2000),
        (["--share", "1e-3"], "share", 0.001),
        (["--kind", "b"], "kind", "b"),
        (["--enable-it"], "enable_it", True),
        (["--no-enable-it"], "enable_it", False),
        (["--disable_it"], "enable_it", False),
        (["--limit", "none"], "limit", None),
        (["--limit", "-1"], "limit", -1),
        (["--extra", '{"a": [1]}'], "extra", {"a": [1]}),
        (["--names", "a", "b"], "names", ["a", "b"]),
    ],
)
def test_each_kind_of_field_is_a_flag(words: list[str], name: str, value: Any) -> None:
    assert vars(example_parser().parse_args(words)) == {name: value}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--count", "x"], "argument --count: 'x' is not an integer"),
        (["--count", "none"], "argument --count: 'none' is not an integer"),
        (["--count", str(2**63)], "argument --count: 9223372036854775808 is not a 64-bit integer"),
        (["--share", "x"], "argument --share: 'x' is not a number"),
        (["--share", "nan"], "argument --share: nan is not a finite number"),
        (["--share=-Infinity"], "argument --share: -inf is not a finite number"),
        (["--kind", "c"], "argument --kind: 'c' is not one of a, b"),
        (["--extra", "[1]"], "argument --extra: '\\[1\\]' is not a JSON object"),
        (["--extra", "{"], "argument --extra: '{' is not JSON"),
        (["--computed", "x"], "unknown flag --computed"),
    ],
)
def test_bad_values_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        example_parser().parse_args(words)


def test_nothing_given_leaves_no_trace() -> None:
    assert vars(example_parser().parse_args([])) == {}


def test_help_shows_defaults_choices_and_the_first_line_of_the_section() -> None:
    text = " ".join(example_parser().format_help().split())
    for part in ("a count of 100% (default: 3)", "--kind {a,b}", "Example: An example section.", "--no-enable-it"):
        assert part in text
    assert "Not shown" not in text and "computed" not in text


def test_every_config_field_is_a_flag_or_internal() -> None:
    """No setting can be reached from one side only."""
    for section in SECTIONS.values():
        for setting in settings_of(section):
            assert setting.flag in PARSER._option_string_actions
            assert setting.help


KEYS = st.text("ab_", min_size=1, max_size=2)
VALUES = st.recursive(
    st.integers() | st.booleans() | st.none() | st.lists(st.integers(), max_size=2) | st.text("xy .=-{", max_size=4),
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=2),
    max_leaves=5,
)


def leaves(value: Any, path: str) -> list[tuple[str, str]]:
    """(path, value as it is typed) of everything within that is no object."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}")]
    return [(path, json.dumps(value))]


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=3), st.data())
def test_json_settings_key_by_key(value: dict[str, Any], data: st.DataObject) -> None:
    parser = FlexibleArgumentParser(prog="test")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--some-flag")
    words = ["a.b"]
    for path, text in data.draw(
        st.permutations(leaves(value, data.draw(st.sampled_from(["--some-flag", "--some_flag"]))))
    ):
        words += [f"{path}={text}"] if data.draw(st.booleans()) else [path, text]
    args = parser.parse_args(words)
    assert json.loads(args.some_flag) == value and args.model_tag == "a.b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pooler-config.dimensions", "needs a value"), ("--pooler-config.a 1 --pooler-config.a 2", "given twice"),
        ("--pooler-config.a 1 --pooler-config.a.b 2", "given twice"), ("--pooler-config..a 1", "key"),
        ("--pooler-config.a.b 1 --pooler-config.a 2", "given twice"), ("--pooler-conf.a 1", "unknown flag --pooler-conf;"),
        ("--pooler-config {} --pooler-config.a 1", "both whole and key by key"),
        ("--pooler-config.a 1 --pooler-config={}", "both whole and key by key"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PARSER.parse_args(words.split())


def help_of(capsys: pytest.CaptureFixture[str], word: str) -> str:
    with pytest.raises(SystemExit) as ended:
        PARSER.parse_args(["--help=" + word])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_group_or_the_flags_with_a_word_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    names = help_of(capsys, "listgroup")
    sections = [section for section in SECTIONS.values() if settings_of(section)]
    assert all(section.__name__ + ":" in names for section in sections) and "--" not in names
    for section in sections:
        text = help_of(capsys, section.__name__.lower())
        assert all(re.search(rf"{s.flag}[, ]", text) for s in settings_of(section))
        others = {s.flag for s in SETTINGS} - {s.flag for s in settings_of(section)}
        assert not [flag for flag in others if re.search(rf"^  {flag}\b(?!-)", text, re.MULTILINE)]
    for word in ("max_num", "--max-num", "MAX-NUM"):
        assert re.findall(r"^  (--[\w-]+)", help_of(capsys, word), re.MULTILINE) == [
            "--max-num-seqs", "--max-num-batched-tokens", "--max-num-encoder-input-tokens",
        ]  # fmt: skip


@pytest.mark.parametrize("word", ["nothing-like-that", "", "--"])
def test_help_with_a_word_that_no_flag_has(word: str) -> None:
    with pytest.raises(ConfigError, match="--help=listgroup"):
        PARSER.parse_args(["--help=" + word])


def test_opposites_work_but_are_not_repeated_in_the_help() -> None:
    assert PARSER.parse_args(["--disable-chunked-prefill"]).enable_chunked_prefill is False
    text = PARSER.format_help()
    assert "--no-enable-chunked-prefill" in text and "--disable-chunked-prefill" not in text


def test_an_empty_default_is_not_shown() -> None:
    @dataclass(frozen=True)
    class Section:
        """A section."""

        name: str = option("", "a name")

    parser = FlexibleArgumentParser(prog="test")
    add_flags(parser, Section)
    assert "a name\n" in parser.format_help()
