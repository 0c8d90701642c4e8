"""Which sentences of its contract a part keeps, for whoever gives points for each: those that every test that knows them has passed."""

from __future__ import annotations

import ast
from typing import Any

from stage01_cli.tools.course.exercises import Exercise, parsed


def kept(exercise: Exercise, results: list[dict[str, Any]]) -> list[str]:
    """The names of the sentences that are kept. `results` are the lines of all of the judge's tests, not only up to the first that fails.

    A test ends with the first sentence that it finds broken, so it has not shown anything of the others that it knows. A sentence that no
    test names is kept if all tests pass.
    """
    named = sentences_of(exercise)
    failed = {str(result["test"]).partition("[")[0] for result in results if result["outcome"] != "passed"}
    open_ones = set().union(*(named.get(test, set(exercise.contract)) for test in failed))
    if failed:
        open_ones |= set(exercise.contract) - set().union(*named.values())
    return [name for name in exercise.contract if name not in open_ones] if results else []


def sentences_of(exercise: Exercise) -> dict[str, set[str]]:
    """Test -> the sentences that it names, or a function of its file that it calls."""
    tree = parsed(exercise.judge.read_text(encoding="utf-8"))
    functions = {
        each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return {
        name: {
            word for each in _reached(name, functions) for word in _words(functions[each]) if word in exercise.contract
        }
        for name in functions
        if name.startswith("test_")
    }


def _reached(name: str, functions: dict[str, Any]) -> set[str]:
    found, ahead = set[str](), [name]
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += [
                each.id for each in ast.walk(functions[one]) if isinstance(each, ast.Name) and each.id in functions
            ]
    return found


def _words(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
