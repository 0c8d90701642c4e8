"""What is read does not answer what is to be written: notebooks, their outputs and the ladder hold no solution of an exercise, unless it is
folded, or the reader has passed."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest

from stage01_cli.tools.course import table
from stage01_cli.tools.course.answers import Answer, answers
from stage01_cli.tools.course.exercises import FOLDER, ROOT, exercises
from stage01_cli.tools.course.own import definitions, open_names

sys.path.insert(0, str(ROOT / "notebooks"))
import build
import lab
from buggy_schedulers import Overtaken, Stalling

from stage03_engine.core.features.spec_decode.ngram_proposer import NgramProposer
from stage03_engine.core.scheduler import Scheduler

FEWEST = 2  # lines of one function: one alone may be chance
LADDER = sorted((ROOT / "notebooks" / "ladder").glob("[1-5]_*.py"))
EACH = pytest.mark.parametrize("source", build.sources(), ids=lambda path: path.stem)


@cache
def every_answer() -> list[Answer]:
    return answers(exercises().values())


def given_away(text: str) -> dict[tuple[int, str], list[str]]:
    """(exercise, function) -> lines of its body that the text holds."""
    lines, found = {line.strip() for line in text.splitlines()}, defaultdict[tuple[int, str], list[str]](list)
    for answer in every_answer():
        found[answer.exercise.number, answer.name] += answer.lines & lines
    return {key: lines for key, lines in found.items() if len(lines) >= FEWEST}


def texts(path: Path) -> Iterator[str]:
    """The cells of a notebook, as they stand in the file, and what they printed; without what is folded and says which exercise it answers."""
    for cell in nbformat.read(path, 4).cells:
        yield re.sub(r"<details><summary>[^<]*exercise \d+.*?</details>", "", cell.source, flags=re.S)
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (value for value in output.get("data", {}).values() if isinstance(value, str))


@EACH
def test_a_notebook_gives_no_solution_away(source: Path) -> None:
    found = [given_away(text) for text in (source.read_text(encoding="utf-8"), *texts(source.with_suffix(".ipynb")))]
    assert not [each for each in found if each]


@pytest.mark.parametrize("step", LADDER, ids=lambda path: path.stem)
def test_the_ladder_has_other_rules_and_says_so(step: Path) -> None:
    """Where it has a part of the same name, the exercise says when to read it."""
    assert not given_away(step.read_text(encoding="utf-8"))
    defined = definitions(ast.parse(step.read_text(encoding="utf-8")))
    alike = [each for each in exercises().values() if any(name in defined.methods() for name in open_names(each))]
    assert {each.number for each in alike} == {"3": {5}, "4": {4, 5}, "5": {4, 5}}.get(step.name[0], set())
    for exercise in alike:
        assert f"(../../ladder/{step.name})" in (exercise.folder / "README.md").read_text(encoding="utf-8")


def test_the_ladders_pools_are_read_after_they_were_written() -> None:
    rows = re.findall(r"^\| ([1-6]) \|.*\|$", (FOLDER / "TEACHING.md").read_text(encoding="utf-8"), re.M)
    plan = (FOLDER / "TEACHING.md").read_text(encoding="utf-8").splitlines()
    week = {number: next(line for line in plan if line.startswith(f"| {number} |")) for number in rows}
    reads = next(number for number, line in week.items() if "the ladder, steps 4 and 5" in line)
    writes = [number for number, line in week.items() if {"4", "5"} & {*re.split(r"[ ,|]+", line.rsplit("|", 2)[1])}]
    assert writes and reads > max(writes)


def test_what_answers_an_exercise_is_shown_when_it_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "WORK", tmp_path)

    def said(*arguments: object, **options: object) -> str:
        lab.source(*arguments, **options)  # type: ignore[arg-type]
        return capsys.readouterr().out

    method = Scheduler._schedule_running
    closed = said(method)
    assert closed.startswith("# Scheduler._schedule_running: answers exercise 5, the scheduler.")
    assert closed.count("\n") == 1
    for part in (Scheduler, Stalling):  # a class that holds it, or another version of it
        assert "answers exercise 5" in said(part)
    assert "answers exercise 11" in said(NgramProposer.propose)
    assert "def _preempt" in said(Overtaken) and "def _give" in said(Scheduler._give), "these are given"
    assert "def _schedule_running" in said(method, spoil=True)
    assert not lab.shown(5) and lab.shown(5, spoil=True)
    table.update(tmp_path, "ex05_scheduler", lambda done: setattr(done, "passed", table.now()))
    assert "def _schedule_running" in said(method) and lab.shown(5) and not lab.shown(13)


def test_the_other_cases_of_notebook_12_wait_for_exercise_13() -> None:
    cells = build.read_source(ROOT / "notebooks" / "12_debug_with_a_trace.py").cells
    after = cells[next(place for place, cell in enumerate(cells) if "## Solutions" in cell.source) :]
    truths = [cell.source for cell in cells if "truth_" in cell.source and "def truth_" not in cell.source]
    assert len(truths) == 2 and all("if lab.shown(13):" in text for text in truths)
    assert (
        after[0].source.count("it answers a part of exercise 13</summary>") == after[0].source.count("<details>") == 2
    )


WARM_UPS = {"01": 1, "04": 2, "07": 10, "09": 2, "10": 5, "11": 6}
"""Notebook -> the exercise of the course whose part its own exercise has, or a smaller one of it."""


@pytest.mark.parametrize(("notebook", "number"), WARM_UPS.items())
def test_an_exercise_that_is_a_smaller_one_is_called_a_warm_up_and_leads_on(notebook: str, number: int) -> None:
    [source] = [each for each in build.sources() if each.name.startswith(notebook)]
    text = source.read_text(encoding="utf-8")
    assert "# ## Warm-up: " in text and "# ## Exercise: " not in text
    assert f"course.start({number}, lab.WORK)" in text.rpartition("# %%\n")[2]
