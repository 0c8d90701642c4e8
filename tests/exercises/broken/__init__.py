"""For each sentence of an exercise's contract: solutions that break this sentence, and no other.

A solution is the reference with a few lines of its text replaced. `test_sentences.py` holds the judges against all of them.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from judging import count_as_solution, load, reference

from stage01_cli.tools.course.exercises import Exercise


@dataclass(frozen=True)
class Broken:
    """`what` is wrong, in a few words; `key` names the sentence (`a or b`: nobody outside can tell which); `changes` are (text of the reference, what stands there instead)."""

    key: str
    what: str
    changes: tuple[tuple[str, str], ...]
    module: str = ""  # of the parts, the end of its name, if these stand in several


def broken(key: str, what: str, *changes: tuple[str, str], module: str = "") -> Broken:
    """One of the solutions."""
    return Broken(key, what, changes, module)


def broken_of(exercise: Exercise) -> list[Broken]:
    """All of an exercise."""
    if not (Path(__file__).parent / f"{exercise.name}.py").is_file():
        return []
    found: list[Broken] = import_module(f"broken.{exercise.name}").BROKEN
    return found


def sources(exercise: Exercise) -> dict[ModuleType, list[str]]:
    """The modules that hold the reference's parts, with the names of these."""
    own = load(exercise.own_reference) if exercise.own_reference.is_file() else None
    where: dict[ModuleType, list[str]] = {}
    for name, text in exercise.parts.items():
        here = getattr(vars(own).get(name), "__module__", None) == own.__name__ if own else False
        module = own if own and here else import_module(text.partition(":")[0])
        where.setdefault(module, []).append(name)
    return where


def with_changes(exercise: Exercise, wrong: Broken, path: Path) -> ModuleType:
    """The reference with the changes, written to `path`. Raises KeyError for a text that does not stand there exactly once."""
    (module, names), *others = [
        (module, names)
        for module, names in sources(exercise).items()
        if module.__name__.endswith(
            wrong.module or (exercise.own_reference.stem if exercise.own_reference.is_file() else "")
        )
    ]
    assert not others, f"{wrong.what}: say in which module"
    source = inspect.getsource(module)
    for old, new in wrong.changes:
        if source.count(old) != 1:
            raise KeyError(f"{wrong.what}: stands {source.count(old)} times in {module.__name__}: {old!r}")
        source = source.replace(old, new)
    if module.__file__ == str(exercise.own_reference):
        path.write_text(source, encoding="utf-8")
        return load(path)
    impl = reference(exercise)
    for name, part in changed_parts(module, names, source, path).items():
        setattr(impl, name, part)
    return impl


def changed_parts(module: ModuleType, names: list[str], source: str, path: Path) -> dict[str, Any]:
    """These parts of a module as `source` has them, beside all else that the module holds already: a class that others know by identity
    must not exist twice."""
    path.write_text(source, encoding="utf-8")
    linecache.checkcache(str(path))
    count_as_solution(path)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if (new := _defines(node)) & {*names} or new - vars(module).keys() - {""}]
    namespace = dict(vars(module))
    exec(compile(tree, str(path), "exec"), namespace)
    return {name: namespace[name] for name in names}


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", "")}
