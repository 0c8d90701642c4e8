"""How sharp are the judges? Change the reference automatically, one place at a time, and count the changes that the judge rejects.

    python tests/exercises/automutants.py 5 --survivors

A change is a comparison, a number that is off by one, an operator, a condition turned round, a statement dropped, or two
statements in the wrong order. Some change nothing that anybody could see; look at the survivors. `TEACHING.md` has the results.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import random
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

for _folder in (
    Path(__file__).parent,
    Path(__file__).parents[1] / "support",
    Path(__file__).parents[1],
    Path(__file__).parents[2],
):
    sys.path.insert(0, str(_folder))

import conftest as _settings  # noqa: E402, F401 - the tests' environment
from judging import Rejected, judge_functions, load, reference, verdict  # noqa: E402

from stage01_cli.tools.course.exercises import Exercise, exercises, find  # noqa: E402
from stage01_cli.tools.course.own import open_names  # noqa: E402

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATE = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNSEEN = (
    "trace.",
    "self._trace",
    "hook",
)  # a judge looks at decisions, not at what the trace or a feature hears of them
SECONDS = 60  # a change that loops is rejected by the clock, as `check` would


@dataclass
class Change:
    """One changed place: its line in the reference's file, what it is, and the whole changed module."""

    line: int
    what: str
    source: str


def changes(exercise: Exercise, module: ModuleType, names: list[str]) -> Iterator[Change]:
    """All changes within the functions and methods that the starter leaves to the reader; within all of a reference.py."""
    source = inspect.getsource(module)
    tree = ast.parse(source)
    wanted = open_names(exercise)
    whole = module.__file__ == str(exercise.own_reference)
    for part in tree.body:
        if not whole and getattr(part, "name", None) not in names:
            continue
        bodies = [part] if isinstance(part, FUNCTIONS) else [
            each for each in getattr(part, "body", [])
            if isinstance(each, FUNCTIONS) and (whole or f"{part.name}.{each.name}" in wanted)
        ]  # fmt: skip
        for body in bodies:
            yield from _of_function(tree, body)


def _of_function(tree: ast.Module, function: ast.AST) -> Iterator[Change]:
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any(word in ast.unparse(node.test) for word in UNSEEN):
            continue
        for what, apply, undo in _ways(node):
            if any(word in what for word in UNSEEN):
                continue
            apply()
            yield Change(getattr(node, "lineno", 0), what, ast.unparse(tree))
            undo()


def _ways(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """(what, apply, undo) for each way to change a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield _swap(node.ops, 0, COMPARE[type(node.ops[0])](), ast.unparse(node))
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATE:
        yield _set(node, "op", OPERATE[type(node.op)](), ast.unparse(node))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield _set(node, "value", node.value + 1, f"{node.value} -> {node.value + 1}")
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _set(node, "value", not node.value, f"{node.value} turned round")
    if isinstance(node, ast.BoolOp):
        yield _set(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And(), ast.unparse(node))
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _set(node, "test", ast.UnaryOp(ast.Not(), node.test), f"not ({ast.unparse(node.test)})")
    if isinstance(node, ast.Name) and node.id in NAMES:
        yield _set(node, "id", NAMES[node.id], f"{node.id} -> {NAMES[node.id]}")
    body = getattr(node, "body", None)
    if isinstance(body, list):
        yield from _statements(body)


def _statements(body: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    for i, statement in enumerate(body):
        text = ast.unparse(statement)
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or any(word in text for word in UNSEEN) or isinstance(statement, ast.Assert):
            continue
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Continue | ast.Break):
            yield _swap(body, i, ast.copy_location(ast.Pass(), statement), f"dropped: {text}")
        if i + 1 < len(body) and isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr) and isinstance(
            body[i + 1], ast.Assign | ast.AugAssign | ast.Expr
        ):  # fmt: skip
            later = body[i + 1]
            yield (
                f"after the next: {text}",
                lambda i=i, s=statement, t=later: body.__setitem__(slice(i, i + 2), [t, s]),
                (lambda i=i, s=statement, t=later: body.__setitem__(slice(i, i + 2), [s, t])),
            )


def _swap(items: list[Any], i: int, new: Any, what: str) -> tuple[str, Any, Any]:
    old = items[i]
    return what, lambda: items.__setitem__(i, new), lambda: items.__setitem__(i, old)


def _set(node: Any, name: str, new: Any, what: str) -> tuple[str, Any, Any]:
    old = getattr(node, name)
    return what, lambda: setattr(node, name, new), lambda: setattr(node, name, old)


def rejected(exercise: Exercise, change: Change, names: list[str], folder: Path) -> bool:
    """Is the changed part rejected? Asked in a process of its own, which the clock ends."""
    path = folder / "changed.py"
    path.write_text(change.source, encoding="utf-8")
    sys.dont_write_bytecode = True  # which Python would take for the next change of the same length, within a second
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        signal.alarm(SECONDS)
        code = 1
        try:
            impl, changed = reference(exercise), load(path)
            for name in names:
                setattr(impl, name, getattr(changed, name))
            code = 0 if verdict(exercise, impl) is None else 1
        except BaseException as error:
            code = 1 if isinstance(error, Exception | Rejected) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != 0


def modules(exercise: Exercise) -> Iterator[tuple[ModuleType, list[str]]]:
    """What is changed, with its parts: the project's own modules, or the reference.py of an open-ended exercise."""
    if exercise.own_reference.is_file():
        yield load(exercise.own_reference), [*exercise.parts]
        return
    where: dict[str, list[str]] = {}
    for name, text in exercise.parts.items():
        if text:
            where.setdefault(text.partition(":")[0], []).append(name)
    for module, names in where.items():
        yield importlib.import_module(module), names


def run(exercise: Exercise, most: int, show: bool) -> tuple[int, int]:
    """(changes tried, changes rejected)."""
    judge_functions(exercise)
    tried = found = 0
    with tempfile.TemporaryDirectory() as folder:
        for module, names in modules(exercise):
            same = Change(0, "nothing", inspect.getsource(module))
            if rejected(exercise, same, names, Path(folder)):
                # its copy has classes of its own, which others do not know
                print(f"  skipped: {module.__name__}: even an unchanged copy is rejected", flush=True)
                continue
            some = list(changes(exercise, module, names))
            for change in random.Random(0).sample(some, min(most, len(some))):
                tried += 1
                if rejected(exercise, change, names, Path(folder)):
                    found += 1
                elif show:
                    print(
                        textwrap.shorten(f"  survives: {module.__name__}, line {change.line}: {change.what}", 150),
                        flush=True,
                    )
    return tried, found


def main() -> None:
    """A line per exercise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercises", nargs="*", help="numbers or names; all if none is given")
    parser.add_argument("--most", type=int, default=100, help="changes tried in a module, drawn at random; 100")
    parser.add_argument("--survivors", action="store_true", help="print what was not rejected")
    args = parser.parse_args()
    for exercise in [find(name) for name in args.exercises] or list(exercises().values()):
        tried, found = run(exercise, args.most, args.survivors)
        share = f"{100 * found / tried:.0f} %" if tried else "nothing to change"
        print(f"{exercise.name}: {found} of {tried} rejected, {share}", flush=True)


if __name__ == "__main__":
    main()
