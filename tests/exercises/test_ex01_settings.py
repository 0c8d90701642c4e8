"""The judge of exercise 1: numbers, flags and sources as people write them, and as they mistype them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hypothesis import given, strategies as st
from judging import Judge

from stage03_engine.args.fields import Setting, parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide, with_detected
from stage03_engine.errors import ConfigError

judge = Judge(1)
FILE = "server.yaml"
SMALL, CAPITAL = "kmgt", "KMGT"


NUMBERS = st.tuples(st.integers(0, 9), st.sampled_from([*SMALL, *CAPITAL, ""]))
LARGE = st.tuples(st.integers(2**53, 2**53 + 9), st.sampled_from(["", "k"]))  # more digits than a float has


@judge.settings(100)
@given(sign=st.sampled_from(["", "", "-", "+"]), number=NUMBERS | LARGE)
def test_whole_numbers(impl: ModuleType, sign: str, number: tuple[int, str]) -> None:
    digits, suffix = number
    text = f"{sign}{digits}{suffix}"
    power = 1 + (SMALL + CAPITAL).index(suffix) % 4 if suffix else 0
    value = digits * (1024 if suffix in CAPITAL else 1000) ** power * (-1 if sign == "-" else 1)
    for spelled in (text, f" {text} "):
        with judge.case(text=repr(spelled)):
            got = impl.parse_int(spelled)
            judge.holds("number", type(got) is int and got == value, value, got)


FRACTIONS = {"1.5k": 1500, "1.1k": 1100, "0.512k": 512, "2.0k": 2000, "0.07m": 70_000, "-2.5g": -2_500_000_000}
NO_FRACTIONS = ["1.5", "2.0", "1.5K", "2.0K", "1.2345k", "0.5T"]


def test_fractions(impl: ModuleType) -> None:
    for text, value in FRACTIONS.items():
        with judge.case(text=repr(text)):
            judge.equal("fraction", value, impl.parse_int(text))
    for text in NO_FRACTIONS:
        with judge.case(text=repr(text)):
            judge.raises("fraction", ValueError, lambda text=text: impl.parse_int(text))


NO_NUMBERS = ["", " ", "-", "k", "four", "1 k", "2kb", "2kk", "1e3", "1_000", "0x10", "1,000", ".5k", "5.k", "+-1", "--1", "٣", "1\u00b2", "inf"]  # fmt: skip


def test_what_is_no_number(impl: ModuleType) -> None:
    for text in NO_NUMBERS:
        with judge.case(text=repr(text)):
            judge.raises("refused", ValueError, lambda text=text: impl.parse_int(text))


@judge.settings(150)
@given(text=st.text(alphabet="0123.kKm-_ e", max_size=6))
def test_any_text_is_a_number_or_refused(impl: ModuleType, text: str) -> None:
    try:
        expected = parse_int(text)
    except ValueError as error:
        with judge.case(text=repr(text)):
            judge.raises("refused", ValueError, lambda: impl.parse_int(text))
            try:
                impl.parse_int(text)
            except ValueError as got:
                judge.equal("refused", str(error), str(got))
        return
    with judge.case(text=repr(text)):
        judge.equal("number", expected, impl.parse_int(text))


WORDS = ["--a_b", "--a_b=c_d", "--a_b.c_d", "--a_b.c_d=e_f", "--a_b=c.d_e", "c_d", "-a_b", "--", "---a_b", "--a-b", "a_b=--c_d", "_"]  # fmt: skip


@judge.settings(100)
@given(words=st.lists(st.sampled_from(WORDS), max_size=4))
def test_underscores_become_dashes(impl: ModuleType, words: list[str]) -> None:
    with judge.case(words=words):
        handed = list(words)
        got = impl.with_dashes(handed)
        judge.equal("dashes", with_dashes(words), got)
        judge.holds("dashes", handed == words, "the list that was handed in as it was", f"it is now {handed}")


@judge.settings(60)
@given(
    word=st.sampled_from(["--port", "--prot", "--por", "--hostt", "--max-num-seq", "--x", "port"]),
    known=st.lists(st.sampled_from(["--port", "--host", "--max-num-seqs", "--max-seqs", "--sport"]), unique=True),
    useless=st.sets(st.sampled_from(["--port", "--max-num-seqs"]), max_size=2),
)
def test_advice(impl: ModuleType, word: str, known: list[str], useless: set[str]) -> None:
    expected = did_you_mean(word, known, lambda name: name not in useless)
    with judge.case(word=word, known=known, useless=sorted(useless)):
        judge.equal("near", expected, impl.did_you_mean(word, iter(known), lambda name: name not in useless))
        judge.equal("near", did_you_mean(word, known), impl.did_you_mean(word, known))


SETTINGS = [
    Setting("max_num_seqs", int, False, 256, ""), Setting("seed", int, True, None, ""), Setting("trace", str, True, None, ""),
    Setting("enforce_eager", bool, False, True, ""), Setting("swap_space", float, False, 4.0, ""),
]  # fmt: skip
TYPED: dict[str, list[Any]] = {  # what a flag gives, and what YAML may give
    "max_num_seqs": [0, 8], "seed": [0, None, 3], "trace": ["", "here"], "enforce_eager": [False, True], "swap_space": [0.0, 0.5],
}  # fmt: skip
TEXTS: dict[str, list[str]] = {
    "max_num_seqs": ["0", "", "many", "2k"], "seed": ["none", "", "7"], "trace": ["none", "", "there"],
    "enforce_eager": ["off", "", "never", "yes"], "swap_space": ["1", "", "nan", "0.25"],
}  # fmt: skip
MORE_IN_A_FILE: dict[str, list[Any]] = {
    "max_num_seqs": ["4k", True, None], "seed": ["none", 1.5], "trace": [3], "enforce_eager": ["no", 0], "swap_space": [2, "2"],
}  # fmt: skip


@dataclass(frozen=True)
class Sources:
    """What each source says about one setting."""

    setting: Setting
    given: dict[str, Any]
    environ: dict[str, str]
    from_file: dict[str, Any]

    def __repr__(self) -> str:
        says = [f"{name} says {source}" for name, source in self._named() if source]
        return f"{self.setting.name}, default {self.setting.default!r}: {'; '.join(says) or 'nobody says anything'}"

    def _named(self) -> list[tuple[str, dict[str, Any]]]:
        names = ["the command line", "the environment", f"the file {FILE}"]
        return list(zip(names, (self.given, self.environ, self.from_file), strict=True))

    @property
    def arguments(self) -> tuple[Setting, dict[str, Any], dict[str, str], dict[str, Any], str]:
        """What `decide` takes: fresh copies."""
        return self.setting, dict(self.given), dict(self.environ), dict(self.from_file), FILE


@st.composite
def sources(draw: st.DrawFn, plain: bool = False) -> Sources:
    """What they may say. Plain is what every setting takes, and what Python counts as true."""
    setting = draw(st.sampled_from(SETTINGS))
    name = setting.name

    def maybe(key: str, values: list[Any]) -> dict[str, Any]:
        return {key: draw(st.sampled_from(values[-1:] if plain else values))} if draw(st.booleans()) else {}

    in_file = MORE_IN_A_FILE[name] + [text for text in TEXTS[name] if text] + TYPED[name]
    given = TYPED[name] if plain else TYPED[name] + [text for text in TEXTS[name] if text]
    return Sources(setting, maybe(name, given), maybe(setting.variable, TEXTS[name]), maybe(name, in_file))


@judge.settings(60)
@given(case=sources(plain=True))
def test_the_strongest_source_decides(impl: ModuleType, case: Sources) -> None:
    with judge.case(sources=case):
        check_source("order", decide(*case.arguments), impl.decide(*case.arguments))


@judge.settings(200)
@given(case=sources())
def test_who_decides_what(impl: ModuleType, case: Sources) -> None:
    with judge.case(sources=case):
        try:
            expected = decide(*case.arguments)
        except ConfigError as error:
            check_refused(impl, case, error)
            return
        got = impl.decide(*case.arguments)
        check_source("named", expected, got)
        kind = type(expected.value)
        judge.holds("typed", type(got.value) is kind and got.value == expected.value,
                    f"{expected.value!r}, of type {kind.__name__}",
                    f"{got.value!r}, of type {type(got.value).__name__}")  # fmt: skip
        judge.equal("origin", facts(expected), facts(got))


def facts(resolved: Any) -> tuple[Any, Any, Any]:
    """All that a Resolved says."""
    return resolved.value, resolved.source, resolved.detail


def check_source(key: str, expected: Resolved, got: Any) -> None:
    judge.holds("origin", hasattr(got, "source"), expected, got)
    judge.holds(key, got.source == expected.source, f"the word of the {expected.source}: {expected.value!r}", got)


def check_refused(impl: ModuleType, case: Sources, error: ConfigError) -> None:
    try:
        got = impl.decide(*case.arguments)
    except ConfigError as refusal:
        judge.equal("blame", str(error), str(refusal))
    except ValueError as refusal:
        judge.rejects("blame", f"ConfigError: {error}", f"{type(refusal).__name__}: {refusal}", refusal)
    else:
        judge.rejects("blame", f"ConfigError: {error}", got)


VALUES = st.sampled_from([None, "auto", 0, "", False, 8, "float32"])
NAMES = st.sampled_from(["device", "dtype"])


@judge.settings(100)
@given(values=st.dictionaries(NAMES, VALUES), found=st.dictionaries(NAMES, st.sampled_from(["cpu", 2, None])),
       source=st.sampled_from(["default", "command line"]))  # fmt: skip
def test_detection(impl: ModuleType, values: dict[str, Any], found: dict[str, Any], source: str) -> None:
    resolved = {name: Resolved(value, source) for name, value in values.items()}
    detected = {name: (value, "what the CPU can do") for name, value in found.items() if name in resolved}
    with judge.case(settings=resolved, detected=detected):
        handed = dict(resolved)
        got = impl.with_detected(handed, dict(detected))
        judge.holds(
            "open", handed == resolved, "the settings that were handed in as they were", f"they are now {handed}"
        )
        right = {name: facts(each) for name, each in with_detected(resolved, detected).items()}
        judge.equal("open", right, {name: facts(each) for name, each in got.items()})
