"""Every exercise's part, loaded through the student's door from a file of its own, stands wherever the reference stood; it serves streaming
HTTP, and its trace is the reference's. Exercises share a server: all of their parts and flags are in it at once, and it gets a request of
each, one after the other. Their loads are served in test_served.py."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from borrowed import hidden
from judging import named, reference

from stage01_cli.tools.course import serving
from stage01_cli.tools.course.differences import of_decisions
from stage01_cli.tools.course.exercises import Exercise, exercises
from stage01_cli.tools.course.own import open_names
from stage01_cli.tools.own_server import own_server
from stagetrace.check.difference import compare

SHARED = ((1, 2, 3, 5, 6, 9, 10, 13, 15), (7, 12), (11, 8), (14, 4, 17), (16,), (18,))
"""Exercises that share a server: their parts replace different things. Of flags that gainsay each other the last one counts."""
PASSED_ON = "from {module} import {name} as _reference\n\n\nclass {name}(_reference):\n    pass\n"
TAKEN = "from {module} import {name}\n"


def solution(exercise: Exercise, folder: Path) -> Path:
    """A file with the reference's parts. What is the project's own is a subclass in it, which is another object."""
    path, own = exercise.solution(folder), exercise.own_reference
    module, text = reference(exercise), own.read_text(encoding="utf-8") if own.is_file() else ""
    for name, where in exercise.parts.items():
        if where and getattr(module, name) is named(where):
            form = PASSED_ON if isinstance(named(where), type) else TAKEN
            text += form.format(module=where.partition(":")[0], name=where.partition(":")[2])
    path.write_text(text, encoding="utf-8")
    return path


Parts = list[tuple[str, str, Path]]


def served(group: list[Exercise], solutions: dict[str, Path], trace: Path) -> tuple[list[str], str, Parts]:
    """The answer to each different request of the group, what the server said, and the parts that came through the door.
    Without solutions it is the reference that serves."""
    files = {each.name: serving.behind_the_door(each, solutions.get(each.name)) for each in group}
    parts = [part for each in group if (file := files[each.name]) for part in serving.parts_of(each, file)]
    flags = [serving.flags_of(each, solutions.get(each.name)) for each in group]
    bodies = [next(ask.sent() for ask in each.serve.load if ask.for_engine) | {"max_tokens": 8} for each in group]
    requests = {repr(body): body for body in bodies}
    with own_server("gpt2-tiny", [*chain(*flags), "--trace", str(trace)], serving.door(parts)) as server:
        answers = ["".join(server.complete(body, f"r{n}")) for n, body in enumerate(requests.values())]
    return answers, "\n".join(server.log), parts


def test_every_exercise_is_served() -> None:
    assert sorted(chain(*SHARED)) == sorted(exercises())


BEHIND = """
import importlib, json, os, sys
parts = json.loads(os.environ["STAGES_PARTS"])
modules = [part["module"] or f"student_{os.path.basename(part['file'])[:-3]}" for part in parts]
for name in ["stage02_server.api_server", "stage03_engine.core.engine_core_proc", *modules]:
    importlib.import_module(name)
for part, name in zip(parts, modules):
    own = getattr(sys.modules[name], part["name"] or "__file__")
    if isinstance(own, type) and not part["keep"]:
        theirs = own.__mro__[1]
        left = [each for each, module in [*sys.modules.items()] if each.startswith("stage0") and theirs in vars(module).values()]
        assert not left, (part, left)
sys.modules["stage03_engine.core.block_pool"].BlockPool(4)
"""


def test_every_part_comes_through_the_door_and_is_watched(tmp_path: Path) -> None:
    """In a process without a server that imports what a server does. The block pool asks the reference, by a way that its text does not show."""
    all_but_one = [each for each in exercises().values() if each.number != 12]  # two replace the scheduler
    files = {each.name: solution(each, tmp_path) for each in all_but_one}
    pool = exercises()[4]
    files[pool.name].write_text(hidden(pool), encoding="utf-8")
    parts = [part for each in all_but_one for part in serving.parts_of(each, files[each.name])]
    environment = os.environ | serving.door(parts, open_names(pool))
    run = subprocess.run([sys.executable, "-c", BEHIND], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for module, name, file in [part for part in parts if part[0]]:
        assert f"{serving.MARK} {module}.{name} is now the one in {file}" in run.stderr
    assert serving.borrowed(run.stderr.splitlines()), "nobody watches it"


@pytest.mark.slow
@pytest.mark.parametrize("numbers", SHARED, ids=lambda numbers: "-".join(f"{each:02}" for each in numbers))
def test_the_parts_serve_and_decide_as_the_reference(numbers: tuple[int, ...], tmp_path: Path) -> None:
    group, own, right = [exercises()[each] for each in numbers], tmp_path / "own", tmp_path / "right"
    solutions = {each.name: solution(each, tmp_path) for each in group}
    answers, said, parts = served(group, solutions, own)
    for module, name, file in [part for part in parts if part[0]]:  # the others are named by a flag
        assert f"{serving.MARK} {module}.{name} is now the one in {file}" in said
    expected, _, _ = served(group, {}, right)
    assert answers == expected
    result = compare(right, own)
    assert result.same, "\n".join(of_decisions(result, right, own))
    assert all(serving.finds_nothing(each, solutions[each.name], own) for each in group)
