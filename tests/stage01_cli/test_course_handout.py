"""`stages course handout`: the copy has no answer, and everything that a student does works in it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_start
import pytest
from patience import PATIENCE

from stage01_cli.main import main
from stage01_cli.tools.course import handouts
from stage01_cli.tools.course.answers import answers
from stage01_cli.tools.course.exercises import JUDGES, ROOT, Exercise, exercises, find
from stage01_cli.tools.course.handouts import DOCUMENTED, WITHHELD, write_handout
from stage01_cli.tools.course.own import open_names, references
from stage01_cli.tools.own_server import own_server

sys.path.append(str(JUDGES))
from pasted import pasted

SCHEDULER, POOL = find("scheduler"), find("block_pool")
EACH = pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)


@pytest.fixture(scope="module", autouse=True)
def no_forks_of_the_project() -> Iterator[None]:
    """Each process loads the copy, and nothing that the tests have loaded."""
    with fork_start.plainly():
        yield


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("class") / "handout"
    write_handout(folder)
    return folder


def environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [copy, copy / "trace"]))}


def python(copy: Path, *words: str, where: str = ".") -> tuple[int, str]:
    """(exit code, what was said) of Python in the copy."""
    run = subprocess.run(
        [sys.executable, *words],
        cwd=copy / where,
        env=environment(copy),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return run.returncode, run.stdout + run.stderr


def course(copy: Path, *words: str) -> tuple[int, str]:
    return python(copy, "-m", "stage01_cli", "course", *words)


def strings(value: Any) -> Iterator[str]:
    """All texts within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def text_lines(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """(file, its lines) of each text; of a notebook, those of its cells and what they printed."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".ipynb":
            text = "\n".join(strings(json.loads(text)))
        yield str(path.relative_to(folder)), {line.strip() for line in text.splitlines()}


def test_no_text_of_the_copy_has_a_line_of_an_answer(copy: Path) -> None:
    known = answers(exercises().values())
    lines = {line: f"exercise {each.exercise.number}, {each.name}" for each in known for line in each.lines}
    assert {each.exercise.number for each in known if each.lines} == {*exercises()}
    found = [(name, lines[line]) for name, said in text_lines(copy) for line in said & lines.keys()]
    alone = tuple(f"exercise {each.number}," for each in exercises().values() if each.alone)
    ladder = "notebooks/ladder/"  # which those may take from
    assert not [each for each in found if not (each[0].startswith(ladder) and each[1].startswith(alone))]
    assert [name for name, said in text_lines(ROOT / "stage03_engine" / "core") if said & lines.keys()], (
        "it would be seen"
    )


@EACH
def test_what_is_open_is_a_stub_with_its_docstring(copy: Path, exercise: Exercise) -> None:
    for module, names in references(exercise).items():
        text = (copy / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert text.count(WITHHELD) >= len(names)
        for name in names:
            assert re.search(rf"^ *(async )?def {name.rpartition('.')[2]}\(", text, re.M), "its signature stays"
    page = (copy / "HANDOUT.md").read_text(encoding="utf-8")
    assert not [name for names in references(exercise).values() for name in names if f"`{name}`" not in page]
    assert open_names(exercise)


def test_no_wrong_or_right_solutions_are_in_it(copy: Path) -> None:
    names = [str(path.relative_to(copy)) for path in copy.rglob("*")]
    assert not [name for name in names if re.search(r"mutants|/broken/|pasted|borrowed|notebooks/answers|\.git$", name)]
    assert "Mistakes to expect" not in (copy / "notebooks/exercises/TEACHING.md").read_text(encoding="utf-8")
    assert {f"tests/exercises/{each.judge.name}" for each in exercises().values()} <= {*names}


def test_a_file_is_as_long_as_it_was(copy: Path) -> None:
    """So the map's links, and the lines of a traceback, lead to where they should."""
    for name in json.loads((copy / "withheld/made.json").read_text())["files"]:
        assert len((copy / name).read_text().splitlines()) == len((ROOT / name).read_text().splitlines()), name


def checked(copy: Path, exercise: Exercise) -> None:
    """The starter is not written, an honest solution passes."""
    number = str(exercise.number)
    assert course(copy, "start", number)[0] == 0
    code, said = course(copy, "check", number)
    assert code == 1 and "not yet written" in said
    exercise.solution(copy / "work").write_text(pasted(exercise), encoding="utf-8")
    code, said = course(copy, "check", number)
    assert code == 0 and "passed (" in said, said


VERBS = """
from stage01_cli.main import main
assert main(["course", "start", "4"]) == 0
open("work/ex04_block_pool.py", "w").write({text!r})
assert [main(["course", *words]) for words in (["check", "4"], ["hint", "4"], ["hint", "4"], ["hint", "4"], ["progress"])] == [0] * 5
"""


@pytest.mark.slow
def test_a_student_works_in_it(copy: Path) -> None:
    code, said = python(copy, "-c", VERBS.format(text=pasted(POOL)))
    assert code == 0 and "passed (" in said and said.count("hint 3 of 3") == 1 and "the reference" not in said, said
    assert f"passed: 1 of {len(exercises())}" in said


LADDER = """
import runpy, sys
sys.path.insert(0, "notebooks/ladder")
for step in ("1_generate", "2_kv_cache", "3_continuous_batching"):
    sys.argv = [step, "To be, or", "--max-tokens", "3"]
    runpy.run_path(f"notebooks/ladder/{step}.py", run_name="__main__")
    print("end of", step)
"""


def test_the_ladder_is_as_it_was_up_to_what_is_withheld(copy: Path) -> None:
    files = [
        path
        for path in (ROOT / "notebooks/ladder").rglob("*.py")
        if str(path.relative_to(ROOT)) not in handouts.AFTERWARDS
    ]
    assert len(files) > 3
    for path in files:
        assert (copy / path.relative_to(ROOT)).read_text() == path.read_text(), path.name


@pytest.mark.slow
def test_the_steps_of_the_ladder_that_are_open_run_in_it(copy: Path) -> None:
    code, said = python(copy, "-c", LADDER)
    assert code == 0 and said.count("end of") == 3, said
    assert not [step for step in said.split("end of")[:3] if not step.strip()]


def test_no_words_of_a_reference_say_what_it_does(copy: Path) -> None:
    """Neither those of a solution of its own, nor those of the engines with a bug."""
    for name in [*(str(each.own_reference.relative_to(ROOT)) for each in exercises().values()), handouts.BUGS]:
        if not (copy / name).is_file():
            continue
        for before, after in zip(*(_docstrings(folder / name) for folder in (ROOT, copy)), strict=True):
            starter = (copy / name).with_name("starter.py")
            assert after == "Withheld." or after in (starter.read_text() if starter.is_file() else ""), before


def _docstrings(path: Path) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, DOCUMENTED)]
    return [said.partition("\n")[0] for node in nodes if (said := ast.get_docstring(node))]


@pytest.mark.long
@EACH
def test_each_exercise_can_be_done_in_it(copy: Path, exercise: Exercise) -> None:
    checked(copy, exercise)
    code, said = course(copy, "serve", str(exercise.number))
    assert code == 0, said


@pytest.mark.long
def test_it_measures_against_the_withheld_part(copy: Path) -> None:
    SCHEDULER.solution(copy / "work").write_text(pasted(SCHEDULER), encoding="utf-8")
    code, said = course(copy, "compare", "5")
    assert code == 0 and "tokens/s" in said, said


@pytest.mark.slow
def test_its_server_answers(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)  # whose stages come first there
    more = {"PYTHONPATH": environment(copy)["PYTHONPATH"]}
    with own_server("gpt2-tiny", ["--num-gpu-blocks-override", "64"], more) as server:
        text = "".join(
            server.complete({"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0, "ignore_eos": True}, "r0")
        )
    assert text == "\nO, I am I am I"


def test_a_notebook_says_in_a_sentence_what_is_withheld(copy: Path) -> None:
    lines = [
        "import inspect, lab",
        "from stage03_engine.core.scheduler import Scheduler",
        "lab.source(Scheduler.schedule, spoil=True)",
        "print(inspect.getsource(Scheduler.schedule).count('raise'))",
        "lab.source(Scheduler._give)",
    ]
    code, said = python(copy, "-c", "\n".join(lines), where="notebooks")
    assert code == 0 and said.startswith(
        "# Scheduler.schedule is withheld: it answers exercise 5\n1\n# stage03_engine/core/"
    )


def test_what_stands_around_an_answer_is_the_text_that_runs(copy: Path) -> None:
    path = copy / "stage03_engine/core/block_pool.py"
    text = path.read_text()
    path.write_text("# A line more.\n" + text + "\n\ndef mine(pool: BlockPool) -> int:\n    return pool.num_free\n")
    code, said = python(copy, "-c", "from stage03_engine.core.block_pool import *; print(mine(BlockPool(4)))")
    path.write_text(text)
    assert (code, said) == (0, "3\n")


def test_another_python_is_told_which_it_needs(copy: Path) -> None:
    made = copy / "withheld" / "made.json"
    before = made.read_text()
    made.write_text(json.dumps(json.loads(before) | {"python": "3.99", "magic": "00"}))
    code, said = python(copy, "-m", "stage01_cli", "course", "list")
    made.write_text(before)
    assert code == 1 and said.count("\n") == 1
    assert said.startswith("This handout was made for Python 3.99, and this is Python 3.")


def test_of_some_exercises_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = (
        "stage03_engine/core/",
        "stage04_kernels/",
        "notebooks/exercises/",
        "notebooks/ladder/",
        "trace/stagetrace/",
    )
    names = [name for name in handouts.tracked() if name.startswith(folders)]
    monkeypatch.setattr(handouts, "tracked", lambda: names)
    assert main(["course", "handout", str(tmp_path / "some"), "--exercises", "8,11"]) == 0
    assert "the answers to 2 exercises are withheld" in capsys.readouterr().out
    files = json.loads((tmp_path / "some/withheld/made.json").read_text())["files"]
    assert {Path(name).name for name in files} == {
        "online_softmax.py",
        "ngram_proposer.py",
        "rejection_sampler.py",
        "reference.py",
    }
    assert "budget = self._schedule_running(" in (tmp_path / "some/stage03_engine/core/scheduler.py").read_text()
    assert "class BlockPool" in (tmp_path / "some/notebooks/ladder/4_paged.py").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["full"], "full is there already; name a folder that is new or empty"),
        (["new", "--exercises", "99"], "--exercises: there is no exercise 99"),
        (["new", "--exercises", "4,x"], "invalid"),
    ],
)
def test_a_wrong_request_is_refused_in_a_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    try:
        code: object = main(["course", "handout", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_without_git_there_is_no_handout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handouts, "ROOT", tmp_path)
    assert main(["course", "handout", str(tmp_path / "new")]) == 2
    assert "is not a git checkout" in capsys.readouterr().err
