"""Only what a student has written earns something. For every exercise, found by reflection, the same ways to write nothing are tried: with the
file read, with the file run, and with a grade; and the reference's text, pasted in, shows that an honest file gets through."""

from __future__ import annotations

from pathlib import Path

import pytest
from borrowed import WAYS, exchanged
from judging import load, verdict, wrong_signatures
from pasted import pasted

import stage01_cli.tools.course as course
from stage01_cli.tools.course import grading, own, serving
from stage01_cli.tools.course.exercises import Exercise, exercises
from stage01_cli.tools.course.guard import NotYourOwn, watching
from stage03_engine.errors import ConfigError

ALL = pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
OPENLY = pytest.mark.parametrize("way", [way for way in WAYS if way != "hidden"])
RUNNING = pytest.mark.parametrize("way", ["inherited", "hidden"])


def written(exercise: Exercise, text: str, folder: Path) -> Path:
    path = exercise.solution(folder)
    path.write_text(text, encoding="utf-8")
    return path


@ALL
def test_an_exercise_leaves_something_open(exercise: Exercise) -> None:
    names = own.open_names(exercise)
    assert names and {*names} == {name for found in own.references(exercise).values() for name in found}


@pytest.mark.slow(keep=("renamed", "ex05", "ex15"))
@ALL
@OPENLY
def test_what_is_borrowed_is_said_by_every_verb(
    exercise: Exercise, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(exercise, WAYS[way](exercise), tmp_path)
    assert course.check(exercise.number, tmp_path) is False
    said = capsys.readouterr().out
    assert f"Write {own.open_names(exercise)[0].partition('.')[0]}" in said or " yourself: " in said
    for verb in (course.serve, course.compare):
        with pytest.raises(ConfigError, match="Write .* yourself: ") as error:
            verb(exercise.number, tmp_path)
        assert len(str(error.value).splitlines()) == 1
    grade = grading.grade_one("student", exercise, path)
    assert grade.points == 0 and " yourself: " in grade.verdict


@ALL
@RUNNING
def test_what_is_borrowed_is_caught_when_it_runs(exercise: Exercise, way: str, tmp_path: Path) -> None:
    """However well the file hides it."""
    path = written(exercise, WAYS[way](exercise), tmp_path)
    solution = load(path)
    assert own.elsewhere(exercise, solution, path) == []
    with (
        watching(exercise, solution, path) as asked,
        pytest.raises(NotYourOwn, match=r"Write .* yourself: .* line \d+\."),
    ):
        verdict(exercise, solution)
    assert asked


@ALL
def test_what_is_exchanged_is_not_written_here(exercise: Exercise, tmp_path: Path) -> None:
    path = written(exercise, exchanged(exercise), tmp_path)
    names = [said.split()[1] for said in own.elsewhere(exercise, load(path), path)]
    assert tuple(names) == own.open_names(exercise)


@ALL
def test_an_honest_file_is_let_in(exercise: Exercise, tmp_path: Path) -> None:
    path = written(exercise, pasted(exercise), tmp_path)
    assert own.problem(exercise, path) is None and own.unwritten(exercise, path) == []
    solution = load(path)
    assert own.elsewhere(exercise, solution, path) == [] and wrong_signatures(exercise, solution) == []


@ALL
def test_a_starter_cannot_serve_yet(exercise: Exercise, tmp_path: Path) -> None:
    """And says what to do, in one line."""
    written(exercise, exercise.starter.read_text(encoding="utf-8"), tmp_path)
    with pytest.raises(ConfigError, match=rf"is not written yet.*stages course check {exercise.number}") as error:
        course.serve(exercise.number, tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_whoever_has_asked_the_reference_while_serving_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"{serving.MARK} Write BlockPool.usage yourself: yours calls the reference's, in line 7."
    monkeypatch.setattr(serving, "record", lambda *given: serving.Run(tmp_path, {}, ["another line", said]))
    with pytest.raises(ConfigError, match=r"ex04_block_pool.py: Write .* yourself: yours calls .*, in line 7\."):
        serving.served(exercises()[4], exercises()[4].solution(tmp_path), tmp_path)


@pytest.mark.slow
def test_the_server_says_who_has_answered(tmp_path: Path) -> None:
    """The part comes through the door, and asks the reference by a way that no reader of its text sees."""
    pool = exercises()[4]
    written(pool, WAYS["hidden"](pool), tmp_path)
    with pytest.raises(ConfigError, match=r"Write .* yourself: yours calls the reference's, in line \d+"):
        course.serve(4, tmp_path)


def test_the_reference_is_as_it_was(tmp_path: Path) -> None:
    from stage03_engine.core.scheduler import Scheduler

    before, scheduler = Scheduler.schedule.__code__, exercises()[5]
    path = written(scheduler, pasted(scheduler), tmp_path)
    with watching(scheduler, load(path), path):
        assert Scheduler.schedule.__code__ is not before
    assert Scheduler.schedule.__code__ is before


def test_each_part_behind_the_door_is_watched(tmp_path: Path) -> None:
    [part] = serving.parts_of(exercises()[5], tmp_path / "a.py")
    listed = serving.door([part], own.open_names(exercises()[5]))["STAGES_PARTS"]
    assert all(name in listed for name in own.open_names(exercises()[5]))
