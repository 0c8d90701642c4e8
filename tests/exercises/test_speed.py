"""What `--speed` measures, with a clock that the test sets: nothing here depends on how fast the machine is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from judging import load, named, reference

from stage01_cli.main import main
from stage01_cli.tools.course import grading, sandbox
from stage01_cli.tools.course.exercises import Exercise, exercises, find
from stage01_cli.tools.course.gradescope import _test
from stage01_cli.tools.course.speed import CALLS, OWN, REFERENCE, ROUNDS, TWIN, Different, Work, measured, taken
from stage01_cli.tools.course.verdict import Verdict, report

shut_in = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
TIMED = [each for each in exercises().values() if each.speed]


class Clock:
    """Time passes only where somebody says so."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, list[tuple[str, int]]()

    def work(self, name: str, seconds: Callable[[int], float]) -> Work:
        def make(number: int) -> Callable[[], int]:
            self.now += 1000.0  # preparing is not timed

            def call() -> int:
                self.now += seconds(number)
                self.order.append((name, number))
                return number

            return call

        return make

    def __call__(self) -> float:
        return self.now


def test_ratios_are_of_one_round_and_the_first_does_not_count() -> None:
    clock = Clock()
    own = clock.work(
        OWN, lambda number: 900.0 if number < CALLS or number % CALLS else 8.0
    )  # each second call is interrupted
    works = {TWIN: clock.work(TWIN, lambda number: 4.0), REFERENCE: clock.work(REFERENCE, lambda number: 1.0), OWN: own}
    assert measured(works, int.__eq__, clock) == {OWN: [2.0] * ROUNDS, REFERENCE: [0.25] * ROUNDS}
    assert len(set(clock.order)) == len(clock.order) == 3 * CALLS * (ROUNDS + 1), "a call with the numbers of another"
    begins = [clock.order[3 * CALLS * turn][0] for turn in range(ROUNDS + 1)]
    assert begins[:4] == [TWIN, REFERENCE, OWN, TWIN]


def test_a_wrong_result_has_no_speed() -> None:
    works: dict[str, Work] = {name: lambda number: lambda: 1 for name in (TWIN, REFERENCE)}
    with pytest.raises(Different):
        measured(works | {OWN: lambda number: lambda: int(number < 9)}, int.__eq__)


def test_the_line_says_ratio_spread_and_reference(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"collected": 0}, {"speed": {OWN: [1.8, 1.6, 2.1], REFERENCE: [0.9, 0.8, 300.0]}}]
    said = "1.8 x the plain twin's time (median of 3 alternating rounds, 1.6 to 2.1); the reference: 0.9 x"
    assert taken(lines) == said and lines == [{"collected": 0}]
    assert taken(lines) == "none: not measured within 50 s" and taken([{"speed": "why"}]) == "none: why"
    exercise = find(7)
    exercise.solution(tmp_path).touch()
    text = report(exercise, exercise.solution(tmp_path), Verdict("passed", "", 1, speed=said))
    assert text.splitlines()[1].startswith(f"speed: {said} (under Triton's interpreter")
    assert (
        _test(grading.Grade("one", exercise.name, 15, "passed", "", 0.0, "", speed=said))["output"] == f"speed: {said}"
    )


@pytest.mark.parametrize("exercise", TIMED, ids=lambda each: each.name)
def test_reference_and_twin_give_the_same(exercise: Exercise) -> None:
    assert exercise.speed
    work, twin = named(exercise.speed.work), named(exercise.speed.twin)
    same, parts = named(f"{exercise.speed.work.partition(':')[0]}:same"), reference(exercise)
    first, second = work(parts, 0)(), work(parts, 1)()
    assert same(first, twin(0)()) and same(second, twin(1)()) and not same(first, second)


LATER = """
    if query.shape[0] == 35:
        raise RuntimeError("only where it is timed")
"""
START = "    keys, values = kv_cache.view("


@pytest.fixture
def paged() -> Iterator[tuple[Exercise, str]]:
    """Exercise 6, and its reference's text as somebody's own."""
    from pasted import pasted

    text = pasted(find(6))
    assert text.count(START) == 1
    yield find(6), text


def test_a_part_that_fails_only_where_it_is_timed_has_no_speed(
    paged: tuple[Exercise, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    exercise, text = paged
    [timing] = [each.Timing for each in request.config.pluginmanager.get_plugins() if hasattr(each, "Timing")]
    path = exercise.solution(tmp_path)
    for more in (LATER, ""):
        path.write_text(text.replace(START, more + START), encoding="utf-8")
        found = timing(exercise).of(request.config, load(path), path)
        assert not more or (found.startswith("line ") and "only where it is timed" in found)
    assert {OWN, REFERENCE} == found.keys() and all(len(each) == ROUNDS for each in found.values())


@shut_in
@pytest.mark.slow
def test_speed_is_measured_in_the_sandbox_and_costs_no_points(paged: tuple[Exercise, str], tmp_path: Path) -> None:
    exercise, text = paged
    for student, written in (("good", text), ("later", text.replace(START, LATER + START))):
        (tmp_path / student).mkdir()
        exercise.solution(tmp_path / student).write_text(written, encoding="utf-8")
    good, later = grading.grade(tmp_path, jobs=1, speed=True)
    assert good.speed.endswith(" x") and f"median of {ROUNDS} alternating rounds" in good.speed
    assert (later.outcome, later.points, good.points) == ("passed", 10, 10)
    assert later.speed.startswith("none: line ") and "only where it is timed" in later.speed


@shut_in
def test_no_speed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    find(5).solution(tmp_path / "one").write_text("", encoding="utf-8")
    for words in (["check", "5", "--speed", "--work", str(tmp_path / "one")], ["grade", str(tmp_path), "--speed"]):
        assert main(["course", *words]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "speed to measure; --speed is for exercises 6 and 7" in line


def test_a_slow_part_is_seen_by_what_it_does() -> None:
    """A part that attends three times does three times the work in each call that is timed."""
    exercise, calls = find(6), count()
    assert exercise.speed
    parts = reference(exercise)
    slow, fast = ModuleType("slow"), parts.paged_attention_torch

    def three_times(*arguments: object) -> object:
        for _ in range(3):
            next(calls)  # the clock
            found = fast(*arguments)
        return found

    slow.write_kv, slow.paged_attention_torch = parts.write_kv, three_times  # type: ignore[attr-defined]
    work, twin = named(exercise.speed.work), named(exercise.speed.twin)
    own, by = (lambda number: work(slow, number)), lambda number: work(parts, number)
    ratios = measured({TWIN: twin, REFERENCE: by, OWN: own}, lambda *_: True, lambda: float(next(calls)))
    assert len(ratios[OWN]) == ROUNDS and min(ratios[OWN]) == 4.0 and set(ratios[REFERENCE]) == {1.0}
