"""What a starter says is given can be called as it says: every call in its texts is one that the project's own part accepts."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from judging import load

from stage01_cli.tools.course.exercises import Exercise, exercises

CALL = re.compile(r"(?<![\w.])(self\.)?(\w+)(\([^()]+\))")
"""In a text: `self._give(request, num_tokens, output)`, or `accepted(setting, value, where)`."""


def texts_of(starter: ModuleType) -> Iterator[tuple[Any, str]]:
    """(the class from which a text's `self` inherits, or None; the text) for every function, class and method of a starter."""
    for part in vars(starter).values():
        if getattr(part, "__module__", None) != starter.__name__:
            continue
        given = part.__mro__[1] if inspect.isclass(part) else None
        methods = vars(part).values() if inspect.isclass(part) else ()
        for each in (part, *(method for method in methods if inspect.isfunction(method))):
            yield given, getattr(each, "fn", each).__doc__ or ""  # a kernel of Triton has its function in .fn


def calls_in(text: str) -> Iterator[tuple[bool, str, ast.Call]]:
    """(of self?, what is called, the call). Prose in brackets is no Python, and a call with `...` leaves something out."""
    for match in CALL.finditer(text):
        of_self, name, arguments = match.groups()
        try:
            call = ast.parse(name + arguments, mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and "..." not in arguments:
            yield bool(of_self), name, call


def checked(starter: ModuleType) -> dict[str, str]:
    """Each call of something given -> what is wrong with it, or nothing."""
    found = {}
    for given, text in texts_of(starter):
        for of_self, name, call in calls_in(text):
            target = getattr(given if of_self else starter, name, None)
            function = getattr(target, "fn", target)
            if of_self and given is not object and target is None:
                found[ast.unparse(call)] = "no such method"
            if not inspect.isfunction(function):
                continue
            arguments = [None] * of_self + [*call.args]
            try:
                inspect.signature(function).bind(*arguments, **{each.arg or "": None for each in call.keywords})
                found[ast.unparse(call)] = ""
            except TypeError as error:
                found[ast.unparse(call)] = str(error)
    return found


@pytest.mark.parametrize("exercise", exercises().values(), ids=lambda each: each.name)
def test_calls_in_a_starters_texts_are_possible(exercise: Exercise) -> None:
    assert not {call: wrong for call, wrong in checked(load(exercise.starter)).items() if wrong}


def test_calls_in_texts_are_found() -> None:
    found = {call for exercise in exercises().values() for call in checked(load(exercise.starter))}
    for call in ("_refuse(state, error, error_param, kind)", "accepted(setting, value, where)"):
        assert call in found
