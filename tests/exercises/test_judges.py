"""Proof that the judges judge: unsolved is unsolved, every planted misconception is rejected for its own reason, and what an
exercise says of itself is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from judging import Rejected, judge_functions, load, reference, signatures, text_of, verdict, wrong_signatures
from mistakes import table, written
from pasted import pasted

from stage01_cli.main import make_parser
from stage01_cli.tools.course.exercises import FOLDER, ROOT, Exercise, exercises

ALL = pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
MUTANTS = [
    pytest.param(each, path, id=f"{each.name}-{path.stem}")
    for each in exercises().values()
    for path in sorted((each.folder / "mutants").glob("*.py"))
]
FIRST = (
    "fractions_by_float", "decodes_each_token", "first_of_the_list", "exit_before_words", "told_once",
    "tokens_alone", "as_many_as_there_are", "counts_when_sampled", "padding_overwrites_the_last_slot",
    "causal_from_the_top", "no_mask", "table_by_position", "always_some_keys", "presence_per_occurrence",
    "repetition_of_the_output_only", "chosen_is_one_of_them", "the_first_occurrence", "down_to_one_token",
    "whole_answer_first", "budget_for_each_queue", "hits_are_not_held", "the_last_takes_the_rest",
    "kv_heads_in_turn", "one_too_many", "only_the_answer", "all_of_it_each_time",
    "ex16_engine-position_in_the_step", "minus_one_is_the_last_place", "one_adapter_per_step",
    "ex18_routing-one_after_the_other",
)  # fmt: skip
"""One or two mutants of each exercise that are rejected soon, with words that no other one hears."""


@ALL
def test_the_starter_is_not_written_and_nothing_else_is_wrong(exercise: Exercise) -> None:
    error = verdict(exercise, load(exercise.starter))
    assert type(error) is NotImplementedError, error


@pytest.mark.parametrize(("number", "examples"), [(5, 150), (11, 200), (18, 300)])
def test_a_solution_gets_every_example_and_the_same_each_time(number: int, examples: int) -> None:
    properties = [each for each in judge_functions(exercises()[number]) if hasattr(each, "hypothesis")]
    chosen = [each._hypothesis_internal_use_settings for each in properties]
    assert max(each.max_examples for each in chosen) == examples and all(each.derandomize for each in chosen)


@ALL
def test_starter_and_reference_take_the_same_arguments(exercise: Exercise) -> None:
    starter, real = (
        signatures(module, exercise, inherited=True) for module in (load(exercise.starter), reference(exercise))
    )
    own = signatures(load(exercise.starter), exercise)
    assert {name: starter[name] for name in own} == {name: real.get(name) for name in own}
    assert {name.partition(".")[0] for name in own} == set(exercise.parts), "a part that the starter does not have"


@pytest.mark.slow(keep=FIRST)
@pytest.mark.parametrize(("exercise", "path"), MUTANTS)
def test_a_misconception_is_rejected_with_its_own_message(exercise: Exercise, path: Path) -> None:
    error = verdict(exercise, load(path))
    assert isinstance(error, Rejected), f"{path.name} is not rejected: {error!r}"
    assert text_of(path, "REJECTED") in str(error), error


@ALL
def test_no_two_misconceptions_share_a_message(exercise: Exercise) -> None:
    messages = [text_of(path, "REJECTED") for path in (exercise.folder / "mutants").glob("*.py")]
    assert 5 <= len(messages) <= 10
    assert len(set(messages)) == len(messages)


@ALL
def test_what_an_exercise_says_of_itself(exercise: Exercise) -> None:
    text = " ".join((exercise.folder / "README.md").read_text(encoding="utf-8").split())
    missing = [sentence for sentence in exercise.contract.values() if sentence not in text]
    assert not missing, "sentences of the contract that its README does not have"
    assert "```" in text, "a picture or an example"
    assert len(exercise.hints) == 3 and len(set(exercise.hints)) == 3
    assert not [place for place in exercise.here if not (ROOT / place.partition("#")[0]).exists()]
    assert set(exercise.needs) <= {*exercises()} - {exercise.number}
    assert exercise.vllm and exercise.minutes and exercise.phase in range(1, 10)
    assert exercise.judge.is_file()


@ALL
def test_the_list_of_exercises_has_each(exercise: Exercise) -> None:
    cells = exercise.number, f"[{exercise.title}]({exercise.folder.name}/README.md)", exercise.goal
    needs = ", ".join(map(str, exercise.needs))
    row = f"| {' | '.join(map(str, (*cells, exercise.minutes, exercise.points, needs)))} |"
    assert row in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()


@ALL
def test_a_notebook_that_an_exercise_names_leads_to_it(exercise: Exercise) -> None:
    notebooks = [ROOT / place for place in exercise.here if place.endswith(".ipynb")]
    assert notebooks or exercise.number in (15, 16), "no notebook is about features, or leads to the end"
    for notebook in notebooks:
        text = notebook.with_suffix(".py").read_text(encoding="utf-8")
        assert f"(exercises/{exercise.folder.name}/README.md)" in text, notebook.name
        assert "stages course start" in text


@pytest.mark.parametrize(("plan", "optional"), [("Six weeks", {7, 16}), ("Ten weeks", set())])
def test_nobody_needs_an_exercise_of_a_later_week(plan: str, optional: set[int]) -> None:
    """Of the six weeks 7 is for those who want it, 16 for those who have finished."""
    chapter = (FOLDER / "TEACHING.md").read_text(encoding="utf-8").partition(f"## {plan}\n")[2].partition("\n## ")[0]
    weeks = re.findall(r"^\| \d+ \|.*\| ([^|]+) \|$", chapter, re.M)
    assert len(weeks) == {"Six weeks": 6, "Ten weeks": 10}[plan]
    week_of = {int(number): week for week, numbers in enumerate(weeks) for number in re.findall(r"\d+", numbers)}
    assert {*week_of} == {*exercises()} - optional
    late = [(n, needed) for n in week_of for needed in exercises()[n].needs if week_of[needed] > week_of[n]]
    assert not late


def test_the_table_of_mistakes_is_new() -> None:
    assert written()[1] == table(), "run python tests/exercises/mistakes.py"


@pytest.mark.parametrize("readme", sorted(FOLDER.rglob("*.md")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_what_the_texts_tell_to_type_can_be_typed(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        for words in map(shlex.split, block.splitlines()):
            if words[:2] == ["stages", "course"]:
                make_parser("course").parse_args(words[1:])
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (readme.parent / target).exists(), f"{readme.name} points to {target}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "line 1"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError"),
        ("import sys\n\nsys.exit(3)\n", "line 3: SystemExit: 3"),
        ("1 / 0\n", "line 1: ZeroDivisionError"),
        ("import pytest\n\npytest.exit('passed', 0)\n", "line 3: Exit: passed"),
    ],
)
def test_why_a_file_cannot_be_loaded_is_said_with_its_line(
    text: str, said: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    [loaded] = [each.loaded for each in request.config.pluginmanager.get_plugins() if hasattr(each, "NotTheirOwn")]
    (tmp_path / "solution.py").write_text(text, encoding="utf-8")
    module, reason = loaded(tmp_path / "solution.py")
    assert module is None and reason.startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [("return {}['x']", "KeyError: 'x' (own.py, line "), ("raise SystemExit", "SystemExit:  (own.py, line ")],
)
def test_what_a_solution_raises_is_said_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    scheduler, path = exercises()[5], tmp_path / "own.py"
    path.write_text(f"{pasted(scheduler)}\n\nclass Scheduler(Scheduler):\n    def schedule(self):\n        {line}\n")
    assert said in str(verdict(scheduler, load(path)))
    path.write_text(path.read_text().replace("schedule(self)", "schedule(self, more)"))
    assert wrong_signatures(scheduler, load(path)) == ["Scheduler.schedule takes (self), not (self, more)"]


@pytest.mark.parametrize(("number", "name"), [(4, "BlockPool.usage"), (11, "num_accepted")])
def test_a_forgotten_return_is_asked_for(number: int, name: str) -> None:
    exercise = exercises()[number]
    solution = reference(exercise)
    part, _, method = name.partition(".")
    wrong = type(part, (getattr(solution, part),), {method: property(lambda self: None)}) if method else no_result
    setattr(solution, part, wrong)
    error = verdict(exercise, solution)
    assert isinstance(error, Rejected) and error.key == "works", error
    assert "NoneType" in str(error) and "is a `return` missing?" in str(error)


def no_result(*_: object) -> None:
    """Nothing, whatever it is asked."""
