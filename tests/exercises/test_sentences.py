"""Each sentence of each contract can be broken alone, and is then the sentence that the verdict quotes."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken import Broken, broken_of, with_changes
from judging import Rejected, verdict

from stage01_cli.tools.course.exercises import Exercise, exercises

CASES = [
    pytest.param(exercise, wrong, id=f"{exercise.name}-{wrong.key}-{wrong.what}".replace(" ", "_"))
    for exercise in exercises().values()
    for wrong in broken_of(exercise)
]


@pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
def test_each_sentence_is_broken_by_somebody(exercise: Exercise) -> None:
    assert {wrong.key.split(" or ")[0] for wrong in broken_of(exercise)} == {*exercise.contract} - {
        *WITHOUT.get(exercise.number, {})
    }
    assert len({(wrong.key, wrong.what) for wrong in broken_of(exercise)}) == len(broken_of(exercise))


@pytest.mark.long  # each is judged as a student's file is: some minutes for each exercise
@pytest.mark.parametrize(("exercise", "wrong"), CASES)
def test_a_broken_sentence_is_the_one_that_the_verdict_quotes(
    exercise: Exercise, wrong: Broken, tmp_path: Path
) -> None:
    error = verdict(exercise, with_changes(exercise, wrong, tmp_path / "solution.py"))
    assert isinstance(error, Rejected), f"{wrong.what}: passes"
    assert error.key in wrong.key.split(" or "), error


WITHOUT: dict[int, dict[str, str]] = {
    11: {"same_text": "it follows from the others"},
    6: {"reference": "it follows from the others"},
    8: {"order": "two parts that merge rightly merge rightly in any order", "reference": "it follows from the others"},
}
"""Sentences that nobody can break alone -> why."""
