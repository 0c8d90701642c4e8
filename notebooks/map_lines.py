"""The lines that the map's links lead to: `[`Scheduler.schedule`](../stage03_engine/core/scheduler.py#L123)`.

The name in a link's text says which line is meant. `build.py` writes the number behind `#L`, and a test says when code has moved.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGES = [FOLDER / "MAP.md", *sorted((FOLDER / "map").glob("*.md"))]
_LINK = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\(([^()#\s]+\.py)(?:#L\d+)?\)")


@cache
def definitions(path: Path) -> dict[str, int]:
    """`Class`, `function`, `Class.method`, `Class.field` and module constants of a Python file, each with its line."""
    lines: dict[str, int] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines[node.name] = node.lineno
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines.setdefault(f"{node.name}.{inner.name}", inner.lineno)
                elif isinstance(inner, ast.AnnAssign):
                    lines[f"{node.name}.{ast.unparse(inner.target)}"] = inner.lineno
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        lines |= {ast.unparse(target): node.lineno for target in targets}
    return lines


def lined(text: str, folder: Path) -> str:
    """The text with the line behind each link to something that a Python file defines. A name that is not there has none."""

    def link(match: re.Match[str]) -> str:
        name, target = match.groups()
        path = folder / target
        line = definitions(path).get(name) if path.exists() else None
        return f"[`{name}`]({target}{'' if line is None else f'#L{line}'})"

    return _LINK.sub(link, text)


def write() -> None:
    """Set the lines of all pages anew."""
    for page in PAGES:
        page.write_text(lined(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")
