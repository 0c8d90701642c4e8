"""The judge of exercise 18: first the rules that every router keeps, then what it gains and loses on the loads."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from types import ModuleType

from hypothesis import given, strategies as st
from judging import Judge, load as load_file

from stage01_cli.tools.course.exercises import find
from stage03_engine.frontend.features.data_parallel.balancing import Candidate

judge = Judge(18)
score = load_file(find(18).folder / "score.py")
CROWD = 16  # more waiting than elsewhere
ENGINES, HIDDEN = (2,), (3, 4)
LIMITS = {"chats": 0.8, "prompts": 0.5, "hot": 1.5}
"""Load -> the most that the mean time to the first token may be of round robin's and of least busy's."""


@st.composite
def engines(draw: st.DrawFn) -> list[Candidate]:
    """Some engines, in the order of their numbers, some of which may be missing."""
    numbers = sorted(draw(st.sets(st.integers(0, 7), min_size=1, max_size=4)))
    load = st.tuples(st.integers(0, 40), st.integers(0, 16), st.integers(0, 12))
    return [Candidate(number, *draw(load)) for number in numbers]


def shown(candidates: Sequence[Candidate]) -> str:
    return "; ".join(
        f"engine {each.engine}: {each.waiting} waiting, {each.running} running, {each.cached_blocks} cached"
        for each in candidates
    )


PROMPT = 12  # blocks


@judge.settings(200)
@given(candidates=engines())
def test_it_is_one_of_them(impl: ModuleType, candidates: list[Candidate]) -> None:
    with judge.case(engines=shown(candidates)):
        numbers = [each.engine for each in candidates]
        got = impl.choose_engine(candidates, PROMPT)
        judge.holds("engine", type(got) is int and got in numbers, f"one of {numbers}", got)


@judge.settings(100)
@given(candidates=engines(), seed=st.integers(0, 99))
def test_it_does_not_depend_on_order(impl: ModuleType, candidates: list[Candidate], seed: int) -> None:
    """Twice in the same order first: who keeps something is told that."""
    shuffled = random.Random(seed).sample(candidates, len(candidates))
    with judge.case(engines=shown(candidates)):
        first, again = (impl.choose_engine(list(candidates), PROMPT) for _ in range(2))
        judge.holds("same", first == again, f"{first}, as before", again)
        got = impl.choose_engine(shuffled, PROMPT)
        judge.holds(
            "order", first == got, f"{first}", f"{got}, if they are given as {[each.engine for each in shuffled]}"
        )


def test_it_keeps_nothing(impl: ModuleType) -> None:
    """A long series of questions, and the same again in another order."""
    draw = random.Random(1)
    asked = []
    for number in range(300):
        most = (3, 9, 12) if number % 2 else (1, 1, 1)  # then some are equal
        asked.append([Candidate(engine, *(draw.randint(0, each) for each in most)) for engine in range(3)])
    first = [impl.choose_engine(each, PROMPT) for each in asked]
    for each, one in draw.sample([*zip(asked, first)], len(asked)):
        with judge.case(engines=shown(each)):
            other = impl.choose_engine(each, PROMPT)
            judge.holds("same", one == other, f"{one}, as before", other)


@judge.settings(300)
@given(candidates=engines())
def test_nobody_is_better(impl: ModuleType, candidates: list[Candidate]) -> None:
    with judge.case(engines=shown(candidates)):
        number = impl.choose_engine(candidates, PROMPT)
        [chosen] = [each for each in candidates if each.engine == number]
        own = chosen.waiting, chosen.running, -chosen.cached_blocks
        for other in candidates:
            others = other.waiting, other.running, -other.cached_blocks
            worse = all(a >= b for a, b in zip(own, others)) and own != others
            judge.holds("better", not worse, f"not {number}, because engine {other.engine} is better", number)


@judge.settings(200)
@given(candidates=engines(), waiting=st.integers(0, 9), running=st.integers(0, 16), cached=st.integers(0, 600))
def test_nobody_is_sent_into_a_crowd(
    impl: ModuleType, candidates: list[Candidate], waiting: int, running: int, cached: int
) -> None:
    crowded = Candidate(8, CROWD + waiting, running, cached)
    near = [Candidate(each.engine, min(each.waiting, waiting), min(each.running, running), 0) for each in candidates]
    with judge.case(engines=shown([*near, crowded]), prompt=f"{cached} blocks"):
        got = impl.choose_engine([*near, crowded], cached)
        judge.holds("crowd", got != 8, f"one of {[each.engine for each in near]}", got)


@cache
def needed(name: str, seed: str, count: int) -> float:
    """The mean time to the first token of the better of round robin and least busy."""
    load = score.LOADS[name](seed, count)
    return min(score.serve(load, policy).ttft for policy in (score.round_robin(), score.least_busy))


def check_load(impl: ModuleType, name: str, seed: str, counts: Sequence[int], key: str) -> None:
    """Of all these numbers of engines together."""
    theirs = sum(needed(name, seed, count) for count in counts)
    own = sum(score.serve(score.LOADS[name](seed, count), impl.choose_engine).ttft for count in counts)
    most = LIMITS[name] * theirs
    said = f"a mean time to the first token of at most {most / len(counts):,.0f} ticks ({LIMITS[name]} of {theirs / len(counts):,.0f})"
    judge.holds(key, own <= most, said, f"{own / len(counts):,.0f} ticks")


def test_where_all_begin_alike_little_is_lost(impl: ModuleType) -> None:
    with judge.case(load="hot: all prompts begin alike"):
        check_load(impl, "hot", "", ENGINES, "hot")


def test_chats_wait_less(impl: ModuleType) -> None:
    with judge.case(load="chats of six turns"):
        check_load(impl, "chats", "", ENGINES, "chats")


def test_long_beginnings_are_found(impl: ModuleType) -> None:
    with judge.case(load="prompts: eight long beginnings"):
        check_load(impl, "prompts", "", ENGINES, "prompts")


def test_on_loads_that_nobody_has_seen(impl: ModuleType) -> None:
    """A class has loads of its own: whoever teaches sets COURSE_SEED."""
    for name in LIMITS:
        with judge.case(load=f"other {name} of the same kind"):
            check_load(impl, name, f"hidden {os.environ.get('COURSE_SEED', '')}", HIDDEN, "hidden")
