"""The judge of exercise 11: short texts over two or three tokens, small vocabularies in fractions, and a toy model that is decoded with
and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import given, strategies as st
from judging import Judge

from stage03_engine.core.features.spec_decode.manifest import SpeculativeConfig

judge = Judge(11)
MOST_STEPS = 40

texts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
lookups = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda pair: (pair[0], pair[0] + pair[1]))


# --- where guesses come from -------------------------------------------------------------------------------------------------------


def occurrences(text: list[int], n: int) -> list[int]:
    """The indices after the earlier occurrences of the last n tokens."""
    return [start + n for start in range(len(text) - n) if text[start : start + n] == text[-n:]]


def continuation(text: list[int], shortest: int, longest: int) -> int | None:
    """As the definition reads."""
    found = (occurrences(text, n) for n in range(longest, shortest - 1, -1))
    return next((each[-1] for each in found if each), None)


def asked(function: Callable[..., Any], text: list[int], *arguments: Any) -> Any:
    """The answer about a text; the text must stay as it was."""
    tokens = np.array(text)
    result = function(tokens, *arguments)
    judge.holds("plain", tokens.tolist() == text, f"the text stays {text}", f"now it is {tokens.tolist()}")
    return result


@judge.settings(40)
@given(text=texts)
def test_find_one_token(impl: ModuleType, text: list[int]) -> None:
    with judge.case(text=text, shortest=1, longest=1):
        got, places = asked(impl.find_continuation, text, 1, 1), occurrences(text, 1)
        judge.holds(
            "latest" if places else "bounds", got == (places or [None])[-1], f"{(places or [None])[-1]}", f"{got}"
        )


@judge.settings(200)
@given(text=texts, lookup=lookups)
def test_find_continuation(impl: ModuleType, text: list[int], lookup: tuple[int, int]) -> None:
    shortest, longest = lookup
    with judge.case(text=text, shortest=shortest, longest=longest):
        got = asked(impl.find_continuation, text, shortest, longest)
        expected = continuation(text, shortest, longest)
        judge.holds(sentence(text, shortest, longest, got), got == expected, f"{expected}", f"{got}")


def sentence(text: list[int], shortest: int, longest: int, got: Any) -> str:
    """What a wrong place says about its finder."""
    found = {n: places for n in range(longest, shortest - 1, -1) if (places := occurrences(text, n))}
    if not found:
        return "bounds"
    for n, places in found.items():
        apart = [place for place in places if place <= len(text) - n]
        if apart:
            return "overlap" if got == apart[-1] != next(iter(found.values()))[-1] else "longest"
    return "overlap" if got is None else "longest"


@judge.settings(100)
@given(text=texts, lookup=lookups, count=st.integers(1, 6))
def test_propose(impl: ModuleType, text: list[int], lookup: tuple[int, int], count: int) -> None:
    shortest, longest = lookup
    with judge.case(text=text, shortest=shortest, longest=longest, num_tokens=count):
        got = asked(proposer(impl, count, shortest, longest).propose, text)
        plain = isinstance(got, list) and all(type(token) is int for token in got)
        judge.holds(
            "plain", plain, "a list of ints", f"{type(got).__name__} of {[type(token).__name__ for token in got]}"
        )
        start = continuation(text, shortest, longest)
        judge.holds("bounds", start is not None or not got, "no guess", f"{got}")
        judge.equal("goes_on", [] if start is None else copied(text, start, count), got)


def proposer(impl: ModuleType, count: int, shortest: int, longest: int) -> Any:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=count, prompt_lookup_min=shortest, prompt_lookup_max=longest
    )
    return impl.NgramProposer(config)


def copied(text: list[int], start: int, count: int) -> list[int]:
    """Token by token, so that it may read what it has just written."""
    longer = list(text)
    for index in range(start, start + count):
        longer.append(longer[index])
    return longer[len(text) :]


# --- what becomes of them ----------------------------------------------------------------------------------------------------------


@st.composite
def verified(draw: st.DrawFn, most_requests: int) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts of each request, and what was sampled in their places and after them."""
    drafts = draw(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=most_requests))
    return drafts, [draw(st.lists(st.integers(0, 2), min_size=len(d) + 1, max_size=len(d) + 1)) for d in drafts]


def beginning(draft: list[int], sampled: list[int]) -> int:
    """How long the two begin alike."""
    return next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))


@judge.settings(60)
@given(case=verified(1))
def test_one_request(impl: ModuleType, case: tuple[list[list[int]], list[list[int]]]) -> None:
    [draft], [sampled] = case
    with judge.case(draft=draft, sampled=sampled):
        got = list(impl.num_accepted(torch.tensor(sampled), [list(draft)]))
        judge.equal("prefix", [beginning(draft, sampled)], got)


@judge.settings(60)
@given(case=verified(4))
def test_several_requests(impl: ModuleType, case: tuple[list[list[int]], list[list[int]]]) -> None:
    drafts, sampled = case
    with judge.case(drafts=drafts, sampled=sampled):
        flat = torch.tensor([token for tokens in sampled for token in tokens])
        judge.equal(
            "places", [*map(beginning, drafts, sampled)], list(impl.num_accepted(flat, [list(d) for d in drafts]))
        )


# --- the textbook form, in fractions -----------------------------------------------------------------------------------------------


class Distribution(list[Fraction]):
    """A probability for each token."""

    def __repr__(self) -> str:
        return "[" + ", ".join(map(str, self)) + "]"


@st.composite
def distributions(draw: st.DrawFn) -> tuple[Distribution, Distribution]:
    """Target and draft, over a few tokens."""
    size = draw(st.integers(1, 3))
    weights = st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any)
    return tuple(Distribution(Fraction(w, sum(ws)) for w in ws) for ws in (draw(weights), draw(weights)))  # type: ignore[return-value]


def near(got: Any, expected: list[Fraction]) -> bool:
    """Equal; in floating point, nearly."""
    return len(got) == len(expected) and all(abs(float(a) - float(b)) < 1e-9 for a, b in zip(got, expected))


@judge.settings(60)
@given(pair=distributions())
def test_acceptance(impl: ModuleType, pair: tuple[Distribution, Distribution]) -> None:
    target, draft = pair
    with judge.case(target=target, draft=draft):
        got = impl.acceptance(Distribution(target), Distribution(draft))
        expected = Distribution(min(Fraction(1), p / q) if q else Fraction(1) for p, q in zip(target, draft))
        judge.holds("acceptance", near(got, expected), expected, Distribution(got))


@judge.settings(60)
@given(pair=distributions())
def test_the_distribution_stays(impl: ModuleType, pair: tuple[Distribution, Distribution]) -> None:
    target, draft = pair
    with judge.case(target=target, draft=draft):
        again = impl.recovered(Distribution(target), Distribution(draft))
        accepted = [min(p, q) for p, q in zip(target, draft)]  # drafted and accepted
        rejected = 1 - sum(accepted)
        with judge.case(accepted=Distribution(accepted), rejected=str(rejected), recovered=Distribution(again)):
            judge.holds("unchanged", len(again) == len(target), f"{len(target)} probabilities", f"{len(again)}")
            got = Distribution(kept + rejected * new for kept, new in zip(accepted, again))
            judge.holds("unchanged", near(got, target), target, got)
            if not rejected:
                judge.holds("no_excess", near(again, target), target, Distribution(again))


# --- all of it ---------------------------------------------------------------------------------------------------------------------


@judge.settings(60)
@given(prompt=texts, model=st.lists(st.integers(0, 1), min_size=4, max_size=4), count=st.integers(1, 4))
def test_the_text_is_the_same(impl: ModuleType, prompt: list[int], model: list[int], count: int) -> None:
    """The toy model knows the token that follows each pair of tokens."""

    def following(text: list[int]) -> int:
        return model[text[-1] * 2 + (text[-2] if len(text) > 1 else 0)]

    plain = list(prompt)
    for _ in range(12):
        plain.append(following(plain))
    with judge.case(prompt=prompt, model=f"{model}, at 2 * last + last but one", num_tokens=count):
        text, guesser, steps = list(prompt), proposer(impl, count, 1, 3), 0
        while len(text) < len(plain) and steps < MOST_STEPS:
            draft = guesser.propose(np.array(text))
            sampled = [following([*text, *draft[:i]]) for i in range(len(draft) + 1)]
            [accepted] = impl.num_accepted(torch.tensor(sampled), [draft])
            text, steps = text + sampled[: accepted + 1], steps + 1
        judge.equal("same_text", plain, text[: len(plain)])
