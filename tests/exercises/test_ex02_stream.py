"""The judge of exercise 2: tokens that cut characters and stop strings in pieces, and what may be sent after each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

from hypothesis import assume, example, given, strategies as st
from judging import Judge
from work import Work, counted_bytes, counted_text

from stage02_server.streaming import server_sent_event
from stage03_engine.frontend.detokenizer import IncrementalDetokenizer, find_stop, held_back
from stage03_engine.frontend.tokenizer import ByteLevelStream
from stage03_engine.sampling_params import SamplingParams

judge = Judge(2)
SPECIAL = b"<|end|>"
PIECES = [b"a", b"b", b"ab", b"aab", b"", b"\xc3", b"\xa9", "é".encode(), b"\xe2\x98", b"\x95", SPECIAL]
"""A vocabulary: token i stands for PIECES[i]. Among them both halves of é, and ☕ as two bytes and one."""


class Vocabulary:
    """A tokenizer with these pieces."""

    def is_special(self, token_id: int) -> bool:
        return PIECES[token_id] == SPECIAL

    def piece(self, token_id: int) -> tuple[str, bytes]:
        return "", PIECES[token_id]

    def stream(self, after: list[int], skip_special_tokens: bool = True) -> ByteLevelStream:
        return ByteLevelStream()


def test_events(impl: ModuleType) -> None:
    for payload in (b"[DONE]", b'{"text": "a"}', '{"text": "☕ \\n"}'.encode(), b"100% {}", b""):
        with judge.case(payload=payload):
            judge.equal("event", server_sent_event(payload), impl.server_sent_event(payload))


CHARACTERS = st.lists(st.sampled_from("aé☕😀"), min_size=1, max_size=3).map("".join)


@judge.settings(60)
@given(text=CHARACTERS, cuts=st.lists(st.integers(0, 12), max_size=5))
def test_characters_of_several_bytes(impl: ModuleType, text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    pieces = [data[start:end] for start, end in pairwise(places)]
    with judge.case(tokens=pieces):
        stream, sent = impl.ByteLevelStream(), ""
        for number, raw in enumerate(pieces, start=1):
            sent += stream.push("", raw)
            right = b"".join(pieces[:number]).decode("utf-8", errors="ignore")  # valid, but perhaps unfinished
            judge.holds("waits", sent == right, f"{right!r} after {number} tokens", repr(sent))


@judge.settings(80)
@given(pieces=st.lists(st.sampled_from([b"a", b"\xff", b"\xc3", b"\xa9", b"\xe2", b"\xe2\x98", b"\x95", b"\xf0\x9f", b"\xc0"]), max_size=5))  # fmt: skip
def test_bytes_that_are_no_text(impl: ModuleType, pieces: list[bytes]) -> None:
    with judge.case(tokens=pieces):
        own, reference = impl.ByteLevelStream(), ByteLevelStream()
        for number, raw in enumerate(pieces, start=1):
            right, got = reference.push("", raw), own.push("", raw)
            with judge.case(token=f"{number}: {raw!r}"):
                judge.equal("broken", right, got)


STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3)


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings that are likely to be in it, one within the other."""
    stops = draw(STOPS)
    pieces = st.sampled_from([*stops, *(stop[:-1] for stop in stops), *"abé"])
    return draw(st.lists(pieces, max_size=4).map("".join)), stops


@judge.settings(80)
@given(case=texts_with_stops(), start=st.integers(0, 4))
@example(case=("ab", ["a", "ab"]), start=0)
@example(case=("ab", ["ab", "a"]), start=0)
@example(case=("ab", ["b", "a"]), start=0)
@example(case=("aba", ["a"]), start=1)
def test_the_first_stop_string(impl: ModuleType, case: tuple[str, list[str]], start: int) -> None:
    text, stops = case
    with judge.case(text=text, stops=stops, start=start):
        judge.equal("first", find_stop(text, stops, start), impl.find_stop(text, list(stops), start))


@judge.settings(80)
@given(case=texts_with_stops())
def test_what_is_held_back(impl: ModuleType, case: tuple[str, list[str]]) -> None:
    text, stops = case
    assume(not any(stop in text for stop in stops))
    with judge.case(text=text, stops=stops):
        judge.equal("held", held_back(text, stops), impl.held_back(text, list(stops)))
        judge.equal("held", 0, impl.held_back(text, []))


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, in the groups in which they arrive, and what its request says."""

    groups: tuple[tuple[int, ...], ...]
    stop: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    ended: bool = False  # by its last token

    def __repr__(self) -> str:
        groups = " | ".join(", ".join(repr(PIECES[i])[1:] for i in group) for group in self.groups)
        settings = [f"{name} {value}" for name, value in self.settings.items()]
        said = [f"stop {list(self.stop)}"] * bool(self.stop) + settings + ["the last one ended it"] * self.ended
        return f"tokens {groups or 'none'}" + "".join(f"; {each}" for each in said)

    @property
    def one_by_one(self) -> Answer:
        """The same tokens, each alone."""
        return Answer(tuple((i,) for group in self.groups for i in group), self.stop, self.settings, self.ended)


@st.composite
def answers(
    draw: st.DrawFn, stops: bool = True, together: bool = False, ended: bool = False, **settings: Any
) -> Answer:
    letters = st.integers(0, 9 if not settings.get("special") else 10)
    groups = draw(
        st.lists(st.lists(letters, min_size=1, max_size=4 if together else 1).map(tuple), min_size=1, max_size=5)
    )
    chosen = {name: draw(value) for name, value in settings.items() if name != "special"}
    return Answer(tuple(groups), tuple(draw(STOPS)) if stops else (), {k: v for k, v in chosen.items() if v != DEFAULTS[k]}, ended)  # fmt: skip


DEFAULTS = {"include_stop_str_in_output": False, "skip_special_tokens": True, "min_tokens": 0}


@dataclass(frozen=True)
class State:
    """What can be seen after an update."""

    stop: str | None
    text: str
    num_tokens: int
    sendable: str
    delta: str


def run(part: Any, answer: Answer) -> list[State]:
    """The state after each group of tokens, and one more after finish() if no stop string ended it."""
    params = SamplingParams(stop=list(answer.stop), max_tokens=99, **answer.settings)
    detokenizer, states = part(Vocabulary(), params), []
    for number, group in enumerate(answer.groups, start=1):
        stop = detokenizer.update(list(group), answer.ended and number == len(answer.groups))
        states.append(state(detokenizer, stop))
        if stop is not None:
            return states
    detokenizer.finish()
    return [*states, state(detokenizer, None)]


def state(detokenizer: Any, stop: str | None) -> State:
    sendable = detokenizer.text[: detokenizer.safe]
    return State(stop, detokenizer.text, detokenizer.num_tokens, sendable, detokenizer.next_text(True))


def check(impl: ModuleType, answer: Answer, end: str, safe: str = "safe") -> None:
    """The states are the reference's. `end` and `safe` name the sentences: of where the text ends, and of what may be sent."""
    with judge.case(answer=answer):
        right, got = run(IncrementalDetokenizer, answer), run(impl.IncrementalDetokenizer, answer)
        for number, (expected, own) in enumerate(zip(right, got, strict=False), start=1):
            when = "after finish()" if number > len(answer.groups) else f"after update {number}"
            for key, what in ((end, "stop"), (end, "text"), (end, "num_tokens"), (safe, "sendable")):
                value, mine = getattr(expected, what), getattr(own, what)
                key = "given" if when == "after finish()" else key
                judge.holds(key, value == mine, f"{WHAT[what]} {value!r} {when}", repr(mine))
            judge.holds("given", expected.delta == own.delta, f"the delta {expected.delta!r} {when}", repr(own.delta))


WHAT = {"stop": "update() returns", "text": "text is", "num_tokens": "num_tokens is", "sendable": "text[:safe] is"}


@judge.settings(40)
@given(answer=answers(stops=False))
def test_text_without_stop_strings(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "broken")


@judge.settings(100)
@given(answer=answers(include_stop_str_in_output=st.booleans()))
def test_stop_strings(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "cut")


@judge.settings(40)
@given(answer=answers(stops=False, special=True, skip_special_tokens=st.booleans()))
def test_special_tokens(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "special")


@judge.settings(60)
@given(answer=answers(min_tokens=st.integers(0, 3)))
def test_not_before_min_tokens(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "minimum")


@judge.settings(80)
@given(answer=answers(together=True, special=True, ended=False, include_stop_str_in_output=st.booleans(), min_tokens=st.integers(0, 3)))  # fmt: skip
def test_several_tokens_at_once(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "at_once")


@judge.settings(40)
@given(answer=answers(ended=True, together=True, include_stop_str_in_output=st.booleans()))
def test_the_token_that_ends_the_answer(impl: ModuleType, answer: Answer) -> None:
    check(impl, answer, "ended")


def test_all_of_the_text(impl: ModuleType) -> None:
    answer = Answer(((0,), (1,), (2,)))
    with judge.case(answer=answer):
        detokenizer, texts = impl.IncrementalDetokenizer(Vocabulary(), SamplingParams()), []
        for [token_id] in answer.groups:
            detokenizer.update([token_id])
            texts.append(detokenizer.next_text(False))
        with judge.case(call="next_text(delta=False) after each token"):
            judge.equal("given", ["a", "ab", "abab"], texts)
        with judge.case(call="then next_text(delta=True)"):
            judge.equal("given", "", detokenizer.next_text(True))


class Counting(Vocabulary):
    """The same pieces; what is done with them is counted."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def is_special(self, token_id: int) -> bool:
        self.work.done += 1
        return super().is_special(token_id)

    def piece(self, token_id: int) -> tuple[str, bytes]:
        self.work.done += 1
        return super().piece(token_id)

    def stream(self, after: list[int], skip_special_tokens: bool = True) -> Any:
        stream = ByteLevelStream()

        def push(token: str, raw: bytes) -> str:
            self.work.done += 1
            return counted_text(self.work, stream.push(token, raw))

        return SimpleNamespace(push=push)


SHORT, LONG = 100, 400  # tokens
MOST = 6  # times the work for four times the tokens: the square would be sixteen times


def test_a_long_answer_costs_no_more_for_each_token(impl: ModuleType) -> None:
    for stop in ([], ["abc"], ["b!", "aaaa"]):
        with judge.case(tokens=f"{SHORT}, then {LONG}, of {PIECES[0]!r} and {PIECES[2]!r} in turn", stop=stop):
            check_linear([work_of_text(impl, number, stop) for number in (SHORT, LONG)])
    with judge.case(tokens=f"{SHORT}, then {LONG}, of halves of é", part="ByteLevelStream"):
        check_linear([work_of_bytes(impl, number) for number in (SHORT, LONG)])


def work_of_text(impl: ModuleType, number: int, stop: list[str]) -> int:
    """What an answer of so many tokens takes."""
    part, work = impl.IncrementalDetokenizer, Work()
    detokenizer = part(Counting(work), SamplingParams(stop=stop, max_tokens=LONG))
    with work.of(part.update):
        for i in range(number):
            detokenizer.update([i % 2 * 2])
            detokenizer.next_text(True)
    return work.done


def work_of_bytes(impl: ModuleType, number: int) -> int:
    part, work = impl.ByteLevelStream, Work()
    stream = part()
    with work.of(part.push):
        for i in range(number):
            stream.push("", counted_bytes(work, PIECES[5 + i % 2]))
    return work.done


def check_linear(done: list[int]) -> None:
    few, many = done
    judge.holds("linear", many <= MOST * max(few, SHORT), f"four times the tokens: at most {MOST} times the work",
                f"{many / few:.0f} times: {few} lines and characters, then {many}")  # fmt: skip
