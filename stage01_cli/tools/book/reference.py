"""The reference of the walk: every public name with its signature and its docstring, read from the source. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_page(path: Path, name: str) -> str:
    """A Markdown page about the module in the file `path`, which stands in the project at `name`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = name.removeprefix("trace/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lines = [f"# {module}", "", f"[{name}](source:{name})", "", *_docstring(tree)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            lines += [f"## {node.name}", "", *_signature(f"class {node.name}", node, name), *_docstring(node)]
            for inner in node.body:
                if isinstance(inner, Function) and not inner.name.startswith("_"):
                    lines += [
                        f"### {node.name}.{inner.name}",
                        "",
                        *_signature(_call(inner), inner, name),
                        *_docstring(inner),
                    ]
        elif isinstance(node, Function) and not node.name.startswith("_"):
            lines += [f"## {node.name}", "", *_signature(_call(node), node, name), *_docstring(node)]
    return "\n".join(lines) + "\n"


def _call(node: Function) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}"


def _signature(text: str, node: ast.ClassDef | Function, name: str) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        text += f"({bases})" if bases else ""
        fields = [
            ast.unparse(each)
            for each in node.body
            if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
        ]
        text = "\n    ".join([text, *fields])
    yield from ("```python", text, "```", "", f"[line {node.lineno}](source:{name}#L{node.lineno})", "")


def _docstring(node: ast.Module | ast.ClassDef | Function) -> Iterator[str]:
    """The docstring as Markdown: lines that are set in are drawings and examples."""
    drawn = False
    for line in (ast.get_docstring(node) or "").splitlines():
        if line.startswith("    ") and not drawn:
            yield from ("", "```text")
            drawn = True
        elif drawn and line and not line.startswith(" "):
            yield from ("```", "")
            drawn = False
        yield line if drawn else line.replace("<", "&lt;").replace("{", "\\{")
    if drawn:
        yield "```"
    yield ""
