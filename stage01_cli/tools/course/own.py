"""Is it the student's own? What a starter leaves open has to be written in the student's file: to inherit it, to import the reference, or to
ask the reference for the answer is no solution. Here the file is read; guard.py watches it while it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from stage01_cli.tools.course.exercises import ROOT, Exercise, exercises, parsed

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
PROJECT = ("stage0", "notebooks", "tests")
SOLVED = ("notebooks.exercises", "tests.exercises")
"""How the names of modules begin that hold solutions, or know them."""


@dataclass
class Definitions:
    """The functions and classes at the top level of a file; later ones replace earlier ones, as they do when it runs."""

    functions: dict[str, FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)

    def find(self, name: str) -> FunctionDef | None:
        """The definition of `parse_int` or `Scheduler.schedule`; a class may have it from another class of the same file."""
        owner, _, method = name.rpartition(".")
        if not owner:
            return self.functions.get(method)
        return next(
            (each for part in self.family(owner) for each in _functions(part.body) if each.name == method), None
        )

    def family(self, name: str, seen: frozenset[str] = frozenset()) -> Iterator[ast.ClassDef]:
        """A class, and those that it inherits from in this file."""
        if name in self.classes and name not in seen:
            yield self.classes[name]
            for base in self.classes[name].bases:
                if isinstance(base, ast.Name):
                    yield from self.family(base.id, seen | {name})

    def methods(self) -> list[str]:
        """All of them, with the names of their classes."""
        return [f"{name}.{each.name}" for name, part in self.classes.items() for each in _functions(part.body)]


def _functions(body: list[ast.stmt]) -> Iterator[FunctionDef]:
    for each in body:
        if isinstance(each, FunctionDef):
            yield each


def definitions(tree: ast.Module) -> Definitions:
    """Of a file."""
    found = Definitions({each.name: each for each in _functions(tree.body)})
    found.classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
    return found


def is_stub(function: FunctionDef) -> bool:
    """Is it still to be written?"""
    return any(
        isinstance(each, ast.Raise) and each.exc is not None and "NotImplementedError" in ast.unparse(each.exc)
        for each in function.body
    )


def open_names(exercise: Exercise) -> tuple[str, ...]:
    """What the starter leaves open, in its order: `parse_int`, `Scheduler.schedule`."""
    names = []
    for each in _tree(exercise.starter).body:
        if isinstance(each, ast.ClassDef):
            names += [f"{each.name}.{method.name}" for method in _functions(each.body) if is_stub(method)]
        elif isinstance(each, FunctionDef) and is_stub(each):
            names.append(each.name)
    return tuple(names)


def references(exercise: Exercise) -> dict[str, tuple[str, ...]]:
    """Module -> the open names that it has a solution of."""
    modules = {where.partition(":")[0] for where in exercise.parts.values() if where}
    places = {module: ROOT / f"{module.replace('.', '/')}.py" for module in sorted(modules)}
    if exercise.own_reference.is_file():
        places[f"notebooks.exercises.{exercise.name}.reference"] = exercise.own_reference
    found, wanted = {module: definitions(_tree(path)) for module, path in places.items()}, open_names(exercise)
    return {
        module: names
        for module, defined in found.items()
        if (names := tuple(name for name in wanted if defined.find(name)))
    }


def place_of(module: str, exercise: Exercise) -> Path:
    """The file of a module that `references` names."""
    return exercise.own_reference if module.startswith(SOLVED) else ROOT / f"{module.replace('.', '/')}.py"


def solutions(exercise: Exercise) -> dict[str, tuple[str, ...]]:
    """Module -> what of it answers the exercise: the open names, and the helpers in the same module that they call and the starter does
    not so much as mention. A reference beside the starter is an answer from its first function to its last."""
    given, found = exercise.starter.read_text(encoding="utf-8"), dict[str, tuple[str, ...]]()
    for module, names in references(exercise).items():
        defined = definitions(_tree(place_of(module, exercise)))
        everything = [*defined.functions, *defined.methods()]
        if module.startswith(SOLVED):
            found[module] = tuple(everything)
            continue
        more = list(names)
        for name in more:  # grows while it is read
            function = defined.find(name)
            called = _called(function, name.rpartition(".")[0]) if function else []
            more += [
                each
                for each in dict.fromkeys(called)
                if each in everything and each not in more and each.rpartition(".")[2] not in given
            ]
        found[module] = tuple(more)
    return found


def _called(function: FunctionDef, owner: str) -> Iterator[str]:
    """The functions of its module, and the methods of its own class, that a function names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield f"{owner}.{node.attr}"


def answered_by(module: str, name: str) -> Exercise | None:
    """The exercise that a function answers, such as `Scheduler.schedule` of `stage03_engine.core.scheduler`; of several, the first."""
    return next(
        (
            exercise
            for exercise in exercises().values()
            if any(where.startswith(f"{module}:") for where in exercise.parts.values())
            and name in solutions(exercise).get(module, ())
        ),
        None,
    )


def _tree(path: Path) -> ast.Module:
    return parsed(path.read_bytes())


def problem(exercise: Exercise, path: Path) -> tuple[str, str] | None:
    """(outcome, a sentence for each thing that is wrong) of a file in which something is missing or borrowed; None if nothing is, or
    if it cannot be read as Python, which whoever runs it will say."""
    try:
        tree = _tree(path)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if missing := list(_missing(exercise, definitions(tree))):
        return "unwritten", "\n".join(missing)
    if borrowed := list(dict.fromkeys([*_imports(exercise, tree), *_asked(exercise, tree)])):
        return "rejected", "\n".join(borrowed)
    return None


def unwritten(exercise: Exercise, path: Path) -> list[str]:
    """The open names that the file defines, and in which something still raises NotImplementedError, as the starter does."""
    found = definitions(_tree(path))
    return [name for name in open_names(exercise) if (own := found.find(name)) and _raises(own)]


def num_written(exercise: Exercise, path: Path) -> tuple[int, int] | None:
    """(how many of the open names the file has written, how many there are); None if it cannot be read."""
    try:
        found = definitions(_tree(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names = open_names(exercise)
    return sum((own := found.find(name)) is not None and not _raises(own) for name in names), len(names)


def _raises(function: FunctionDef) -> bool:
    """Does anything in it raise NotImplementedError?"""
    return any(
        isinstance(each, ast.Raise) and each.exc is not None and "NotImplementedError" in ast.unparse(each.exc)
        for each in ast.walk(function)
    )


def _missing(exercise: Exercise, found: Definitions) -> Iterator[str]:
    absent: list[str] = []
    for name in open_names(exercise):
        owner = name.partition(".")[0]
        what = name if owner in found.classes or owner == name else owner
        if found.find(name) is None and what not in absent:
            absent.append(what)
    yield from (f"Write {name} yourself: your file does not define it." for name in absent)


def _imports(exercise: Exercise, tree: ast.Module) -> Iterator[str]:
    """Of the modules that hold a reference a file may import what its starter does, and nothing else: their helpers are half of it."""
    solved = references(exercise)
    given = {(module, name) for module, name, _ in _imported(_tree(exercise.starter))}
    for module, name, line in _imported(tree):
        if (module, name) in given:
            continue
        whole = f"{module}.{name}"
        if found := [each for each in solved if each in (module, whole)]:
            place = f"{name} from {module}" if name else module
            yield f"Write {_part_of(solved[found[0]], name)} yourself: line {line} imports {place}, where the reference is."
        elif whole.startswith(SOLVED):
            yield f"Write your part yourself: line {line} imports {whole}, where solutions are."
        elif name in exercise.parts and module.startswith(PROJECT):
            yield f"Write {name} yourself: line {line} imports the reference from {module}."
        elif exercise.alone and whole.startswith(PROJECT):
            yield f"Write your part yourself: line {line} imports {module}, and this exercise takes nothing of the project."


def _imported(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """(module, name in it, line) of each import; the name of `import module` is empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or ".", alias.name, node.lineno) for alias in node.names)


def _asked(exercise: Exercise, tree: ast.Module) -> Iterator[str]:
    """`super().schedule()` and `Mechanics.schedule(self)`, unless the file has a second class with such a method."""
    given = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = [method.name for each in definitions(tree).classes.values() for method in _functions(each.body)]
    names = {
        name.rpartition(".")[2]: name for name in open_names(exercise) if "." in name and not name.endswith("__init__")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in names or own.count(node.attr) > 1:
            continue
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "super":
            yield f"Write {names[node.attr]} yourself: line {node.lineno} asks the class that it inherits from."
        elif isinstance(value, ast.Name) and value.id in given:
            yield f"Write {names[node.attr]} yourself: line {node.lineno} asks {value.id} for it."


def _part_of(names: tuple[str, ...], name: str) -> str:
    """Those that an import of `name` brings, or some of them."""
    brought = [each for each in names if each.partition(".")[0] == name] or names
    return ", ".join(brought[:2]) + f" and {len(brought) - 2} more" * (len(brought) > 2)


def elsewhere(exercise: Exercise, module: ModuleType, path: Path) -> list[str]:
    """A sentence for each open name that the loaded file took from somewhere else, whatever the text of the file looks like."""
    return [
        f"Write {name} yourself: what your file calls {name} was not written in it."
        for name in open_names(exercise)
        if (function := function_of(module, name)) is None or function.__code__.co_filename != str(path)
    ]


def function_of(module: ModuleType, name: str) -> FunctionType | None:
    """The function behind `name` in a module: of a property, a static method, a kernel, or what a decorator wraps."""
    owner, _, method = name.rpartition(".")
    if not owner:
        found = vars(module).get(method)
    else:
        classes = getattr(vars(module).get(owner), "__mro__", ())
        found = next((vars(each)[method] for each in classes if method in vars(each)), None)
    return plain(found)


def plain(found: Any) -> FunctionType | None:
    """The function inside of whatever wraps it."""
    for _ in range(10):
        if isinstance(found, FunctionType) and not hasattr(found, "__wrapped__"):
            return found
        for inner in ("__wrapped__", "__func__", "fget", "fn", "func"):
            if (next_one := getattr(found, inner, None)) is not None:
                found = next_one
                break
    return None
