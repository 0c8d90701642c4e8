"""Solutions that nobody has written, made for every exercise from its starter: what is left open is deleted, inherited, or asked of the
reference. None of them may earn anything."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from stage01_cli.tools.course.exercises import Exercise
from stage01_cli.tools.course.own import FunctionDef, is_stub, references


def deleted(exercise: Exercise) -> str:
    """The starter without its stubs."""
    return _changed(exercise, lambda function, owner, module: None)


def inherited(exercise: Exercise) -> str:
    """Each method gives what `super()` gives, and the class inherits from the reference; a function gives what the reference gives."""

    def asks(function: FunctionDef, owner: str, module: str) -> str:
        return _call(function, "super()") if owner else _call(function, f"theirs_{function.name}")

    lines = [f"from {module} import {name} as theirs_{name}" for module, name in _parts(exercise)]
    return _changed(exercise, asks, lines, bases=lambda module, name: f"theirs_{name}")


def renamed(exercise: Exercise) -> str:
    """Each function hands its arguments on to the reference, whose module goes by another name."""
    modules = list(references(exercise))
    lines = [f"import {module} as theirs{number}" for number, module in enumerate(modules)]

    def asks(function: FunctionDef, owner: str, module: str) -> str:
        theirs = f"theirs{modules.index(module)}"
        return _call(function, f"{theirs}.{owner or function.name}", with_self=bool(owner))

    return _changed(exercise, asks, lines, lambda module, name: f"theirs{modules.index(module)}.{name}")


def hidden(exercise: Exercise) -> str:
    """The same, and no import shows it."""

    def asks(function: FunctionDef, owner: str, module: str) -> str:
        whom = f"theirs_{owner or function.name}"
        return _call(function, whom, with_self=bool(owner))

    lines = [
        f"theirs_{name} = __builtins__['__import__']({module!r}, fromlist=['']).{name}"
        for module, name in _parts(exercise)
    ]
    return _changed(exercise, asks, lines)


def exchanged(exercise: Exercise) -> str:
    """The starter, whose functions are exchanged for the reference's when it is loaded."""
    lines = [exercise.starter.read_text(encoding="utf-8")]
    for module, names in references(exercise).items():
        for owner, _, method in (name.rpartition(".") for name in names):
            lines.append(f"from {module} import {owner or method} as theirs")
            lines.append(f"{owner}.{method} = theirs.{method}" if owner else f"{method} = theirs")
    return "\n".join(lines) + "\n"


WAYS: dict[str, Callable[[Exercise], str]] = {
    "deleted": deleted, "inherited": inherited, "renamed": renamed, "hidden": hidden,
}  # fmt: skip


def _parts(exercise: Exercise) -> list[tuple[str, str]]:
    """(module, class or function) of all that the reference has a solution of."""
    names = [(module, name.partition(".")[0]) for module, found in references(exercise).items() for name in found]
    return list(dict.fromkeys(names))


def _call(function: FunctionDef, of_whom: str, with_self: bool = False) -> str:
    """`return` what `of_whom` gives for the function's own arguments."""
    arguments = [each.arg for each in function.args.args]
    is_method = of_whom == "super()" or with_self
    if any(ast.unparse(each) == "property" for each in function.decorator_list):
        return f"return {of_whom}.{function.name}" + (".fget(self)" if with_self else "")
    given = ", ".join(arguments if with_self or not is_method else arguments[1:])
    whole = f"{of_whom}.{function.name}" if is_method else of_whom
    return f"return {'await ' * isinstance(function, ast.AsyncFunctionDef)}{whole}({given})"


def _changed(
    exercise: Exercise,
    body: Callable[[FunctionDef, str, str], str | None],
    lines: list[str] | None = None,
    bases: Callable[[str, str], str] | None = None,
) -> str:
    """The starter with `lines` after its imports, and another body in each function that is left open, or none where that is None."""
    tree = ast.parse(exercise.starter.read_text(encoding="utf-8"))
    places = {name: module for module, names in references(exercise).items() for name in names}
    for part in tree.body:
        if isinstance(part, ast.ClassDef):
            of_part = [module for name, module in places.items() if name.startswith(f"{part.name}.")]
            part.body = list(_bodies(part.body, part.name, places, body)) or [ast.Pass()]
            if bases and of_part:
                part.bases = [ast.parse(bases(of_part[0], part.name), mode="eval").body]
    tree.body = list(_bodies(tree.body, "", places, body))
    last = max(i for i, each in enumerate(tree.body) if isinstance(each, ast.Import | ast.ImportFrom))
    tree.body[last + 1 : last + 1] = ast.parse("\n".join(lines or [])).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _bodies(
    statements: list[ast.stmt], owner: str, places: dict[str, str], body: Callable[[FunctionDef, str, str], str | None]
) -> Iterator[ast.stmt]:
    for each in statements:
        if isinstance(each, FunctionDef) and is_stub(each):
            text = body(each, owner, places[f"{owner}.{each.name}" if owner else each.name])
            if text is None:
                continue
            each.body = (
                ast.parse(f"def f():\n {text}" if "await" not in text else f"async def f():\n {text}").body[0].body
            )  # type: ignore[attr-defined]
        yield each
