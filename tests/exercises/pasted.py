"""An honest solution of every exercise: the reference's text, written into the starter. It shows that what keeps cheats out lets
students in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from stage01_cli.tools.course.exercises import ROOT, Exercise
from stage01_cli.tools.course.own import FunctionDef, definitions, is_stub, references


def pasted(exercise: Exercise) -> str:
    """The starter with the reference's text in the place of its stubs, and whatever that text needs."""
    tree = ast.parse(exercise.starter.read_text(encoding="utf-8"))
    more: dict[str, ast.stmt] = {}
    for module, names in references(exercise).items():
        source = ast.parse(_file(module, exercise).read_text(encoding="utf-8"))
        found, wanted = definitions(source), list[ast.AST]()
        for part in tree.body:
            if isinstance(part, ast.ClassDef) and any(name.startswith(f"{part.name}.") for name in names):
                theirs = found.classes[part.name]
                if module.startswith("notebooks"):  # one text, which hangs together
                    part.body = [each for each in part.body if not isinstance(each, FunctionDef)] + _methods(theirs)
                elif not any(ast.unparse(base).endswith(("Mechanics", "Registry")) for base in part.bases):
                    had = {each.name for each in part.body if isinstance(each, FunctionDef)}
                    part.body += [each for each in _methods(theirs) if getattr(each, "name", "") not in had]
                wanted += list(
                    _written(part.body, {each.name: each for each in theirs.body if isinstance(each, FunctionDef)})
                )
        wanted += list(_written(tree.body, {name: found.functions[name] for name in names if name in found.functions}))
        _needed(wanted, source, {*exercise.parts} | _names(tree), more)
    last = max(i for i, each in enumerate(tree.body) if isinstance(each, ast.Import | ast.ImportFrom))
    tree.body[last + 1 : last + 1] = sorted(
        more.values(), key=lambda each: not isinstance(each, ast.Import | ast.ImportFrom)
    )
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _names(tree: ast.Module) -> set[str]:
    """What the starter imports and defines."""
    imports = [alias for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom) for alias in each.names]
    return {getattr(each, "name", "") for each in tree.body} | {alias.asname or alias.name for alias in imports}


def _file(module: str, exercise: Exercise) -> Path:
    return exercise.own_reference if module.startswith("notebooks") else ROOT / f"{module.replace('.', '/')}.py"


def _methods(part: ast.ClassDef) -> list[ast.stmt]:
    return [each for each in part.body if isinstance(each, FunctionDef)]


def _written(body: list[ast.stmt], theirs: dict[str, FunctionDef]) -> Iterator[FunctionDef]:
    """The functions of the body, after the stubs were given the text of theirs."""
    for each in body:
        if isinstance(each, FunctionDef) and (each.name in theirs):
            if is_stub(each):
                each.body = theirs[each.name].body
            yield each


def _needed(wanted: list[ast.AST], source: ast.Module, have: set[str], more: dict[str, ast.stmt]) -> None:
    """What stands at the top of the reference's module, and is used."""
    top: dict[str, ast.stmt] = {}
    more_of: dict[str, ast.stmt] = {}
    for each in source.body:
        if isinstance(each, ast.Import | ast.ImportFrom):
            for alias in each.names:
                one = (
                    ast.Import([alias])
                    if isinstance(each, ast.Import)
                    else ast.ImportFrom(each.module, [alias], each.level)
                )
                top[(alias.asname or alias.name).partition(".")[0]] = one
        elif isinstance(each, FunctionDef | ast.ClassDef):
            top[each.name] = each
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                top |= {name.id: each for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(each, ast.AugAssign):
            more_of.setdefault(ast.unparse(each.target), each)
    for node in [node for each in wanted for node in ast.walk(each) if isinstance(node, ast.Name)]:
        if node.id in top and node.id not in have and node.id not in more:
            more[node.id] = top[node.id]
            if node.id in more_of:
                more[f"{node.id} |="] = more_of[node.id]
            if not isinstance(top[node.id], ast.Import | ast.ImportFrom):
                _needed([top[node.id]], source, have, more)
