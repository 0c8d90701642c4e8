"""The text of the answers to the exercises: what a handout withholds, and what no notebook may print."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stage01_cli.tools.course.exercises import ROOT, Exercise, parsed
from stage01_cli.tools.course.own import FunctionDef, definitions, place_of, solutions

SHORTEST = 31  # characters of a line that is looked for: a shorter one may stand anywhere by chance
CODE = ("stage01_cli", "stage02_server", "stage03_engine", "stage04_kernels", "trace")


@dataclass(frozen=True)
class Answer:
    """A function that answers an exercise, and the lines of its body that stand nowhere else in the project's code, nor in what the
    exercise gives."""

    exercise: Exercise
    path: Path
    name: str
    lines: frozenset[str]


def answers(some: Iterable[Exercise]) -> list[Answer]:
    """Of these exercises."""
    found: list[Answer] = []
    common = _common()
    for exercise in some:
        given = "".join(path.read_text(encoding="utf-8") for path in _given(exercise))
        for module, names in solutions(exercise).items():
            path = place_of(module, exercise)
            text = path.read_text(encoding="utf-8")
            defined = definitions(parsed(text))
            for name in names:
                if (function := defined.find(name)) is not None:
                    body = {line for line in body_of(function, text.splitlines()) if len(line) >= SHORTEST}
                    found.append(
                        Answer(
                            exercise, path, name,
                            frozenset(line for line in body if common[line] == 1 and line not in given),
                        )
                    )  # fmt: skip
    return found


def _given(exercise: Exercise) -> Iterator[Path]:
    """What a student is shown."""
    yield from (exercise.folder / name for name in ("starter.py", "exercise.toml", "README.md"))
    yield exercise.judge


@cache
def _common() -> Counter[str]:
    """Line -> how often it stands in the project's code, and in the references beside starters."""
    found = Counter[str]()
    places = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*places, *sorted((ROOT / "notebooks" / "exercises").glob("*/reference.py"))]:
        found.update(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if len(line) >= SHORTEST)
    return found


def functions(tree: ast.Module) -> Iterator[FunctionDef]:
    """Those of a module and the methods of its classes."""
    for each in tree.body:
        if isinstance(each, FunctionDef):
            yield each
        elif isinstance(each, ast.ClassDef):
            yield from (method for method in each.body if isinstance(method, FunctionDef))


def body_of(function: FunctionDef, lines: list[str]) -> list[str]:
    """The lines behind the docstring, without what stands before and behind the text."""
    if (span := span_of(function)) is None:
        return []
    return [line.strip() for line in lines[span[0] : span[1]]]


def span_of(function: FunctionDef) -> tuple[int, int] | None:
    """The lines of the body behind the docstring, from 0, the end excluded; None where there are none, or where it begins in the line of the
    signature."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    before = function.body[0].end_lineno if len(body) < len(function.body) else _end_of_signature(function)
    if not body or before is None or body[0].lineno <= before or function.end_lineno is None:
        return None
    return before, function.end_lineno


def _end_of_signature(function: FunctionDef) -> int:
    """The last line of the arguments and of what is returned; comments before the first statement belong to the body."""
    parts = [*ast.walk(function.args), *([function.returns] if function.returns else [])]
    return max([function.lineno, *(getattr(each, "end_lineno", 0) or 0 for each in parts)])
