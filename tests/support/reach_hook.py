"""Each function of the project stores a byte when it runs, in a file that the processes of one pytest worker share (see `reach.py`).

Every Python process that finds the variable REACH executes this file at its start. So it imports little, and nothing of the project.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import marshal
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

_plain = importlib.machinery.SourceFileLoader.get_code
_files: dict[str, tuple[int, int, str]] = {}
_folder = ""


def install(path: str) -> None:
    """Note in the file at `path` what this process, and what it forks, executes of the files in the table beside it."""
    global _folder
    _folder = os.path.dirname(path)
    with open(os.path.join(_folder, "table"), "rb") as file:
        _files.update(marshal.load(file))
    with open(path, "r+b") as file:
        builtins.__reach__ = mmap.mmap(file.fileno(), 0)  # type: ignore[attr-defined]
    importlib.machinery.SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]


def _get_code(loader: Any, fullname: str) -> Any:
    """In place of the loader's own: of a file in the table, code that notes. It is kept beside the table, not among Python's byte code."""
    path = os.path.realpath(loader.get_filename(fullname))
    first, changed, name = _files.get(path, (0, 0, ""))
    if not name or os.stat(path).st_mtime_ns != changed:
        return _plain(loader, fullname)
    kept = os.path.join(_folder, "code", f"{name}.{sys.implementation.cache_tag}")
    try:
        with open(kept, "rb") as file:
            return marshal.load(file)
    except OSError:
        code = compile(instrumented(loader.get_source(fullname), first), path, "exec", dont_inherit=True)
    with open(f"{kept}.{os.getpid()}", "wb") as file:
        marshal.dump(code, file)
    os.replace(file.name, kept)
    return code


def functions(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(qualified name, node) of every function, in the order of the source. Of two with one name, the second is `name#2`."""
    import ast

    seen: dict[str, int] = {}
    waiting = [(prefix, tree)]
    while waiting:
        prefix, node = waiting.pop()
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                name = prefix + node.name
                seen[name] = seen.get(name, 0) + 1
                yield name if seen[name] == 1 else f"{name}#{seen[name]}", node
        waiting += [(inner, child) for child in reversed([*ast.iter_child_nodes(node)])]


def is_read(function: Any) -> bool:
    """A Triton kernel: its source is read, and not executed."""
    import ast

    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def instrumented(source: str, first: int) -> Any:
    """The tree of a module each of whose functions begins by storing its number, counted from `first`."""
    import ast

    tree = ast.parse(source)
    has_torch = any(isinstance(node, ast.Import) and node.names[0].name == "torch" for node in tree.body)
    for number, (_, function) in enumerate([*functions(tree)], first):
        if is_read(function):
            continue
        text = f"__reach__[{number}] = 1"
        if has_torch and not any(isinstance(node, ast.Import) for node in ast.walk(function)):
            text = f"if not torch.compiler.is_compiling(): {text}"  # torch.compile would refuse the statement
        (statement,) = ast.parse(text).body
        place = int(ast.get_docstring(function, clean=False) is not None)
        there: Any = function.body[min(place, len(function.body) - 1)]
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = there.lineno
                node.col_offset = node.end_col_offset = there.col_offset
        function.body.insert(place, statement)
    return tree
