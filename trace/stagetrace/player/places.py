"""Where in the source an event is emitted: its file, and the function, which the walk through the code shows too."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

WALK = Path("notebooks", "pictures", "walk.html")
"""The page that `stages walk` writes; `walk.html#fn=Scheduler.schedule` opens it at that function."""


def root_of_source() -> Path | None:
    """The project's folder, in which the stages and the walk's page lie; None if only `stagetrace` is here."""
    found = find_spec("stage03_engine")  # looked for, not imported
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]).parent if folders else None


def place_of(stage: str, file: str, name: str) -> tuple[str, str] | None:
    """(folder, function) of the file of this stage that emits events of this name: `("stage03_engine/core", "Scheduler.schedule")`.

    A recording names only the file, and its line may have moved since: what counts is that the event's name stands there. None if no
    file does, or several do; the function is "" if the name stands in several, or outside of all.
    """
    root = root_of_source()
    found = [path for path in _files(root, stage).get(file, ()) if name in _emitters(path)] if root is not None else []
    if root is None or len(found) != 1:
        return None
    functions = _emitters(found[0])[name]
    return found[0].parent.relative_to(root).as_posix(), functions[0] if len(functions) == 1 else ""


@lru_cache(maxsize=8)
def _files(root: Path, stage: str) -> dict[str, list[Path]]:
    """The files of a stage by name."""
    files: dict[str, list[Path]] = {}
    for path in sorted((root / stage).rglob("*.py")):
        files.setdefault(path.name, []).append(path)
    return files


@lru_cache(maxsize=256)
def _emitters(path: Path) -> dict[str, list[str]]:
    """Each dotted name that is written in a file -> the functions that it is written in, as `Class.method`."""
    found: dict[str, list[str]] = {}

    def look(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            functions = found.setdefault(node.value, [])
            if function not in functions:
                functions.append(function)
        for child in ast.iter_child_nodes(node):
            look(child, function)

    look(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


@lru_cache(maxsize=1)
def _walk(root: Path) -> str:
    page = root / WALK
    return page.read_text(encoding="utf-8") if page.is_file() else ""


def is_on_the_walk(function: str) -> bool:
    """Whether the walk's page has a stop at this function."""
    root = root_of_source()
    return bool(function) and root is not None and f'"{function}"' in _walk(root)
