"""In a handout: gives the functions that its source files withhold the code that answers the exercises.

This file is not used where it lies. `stages course handout` copies it into the `stagetrace` of the copy, and each stage there
imports it. The text of a withheld function is a stub; its code lies in `withheld/` as Python's byte code, which one minor version of Python
reads, and is put into the function when its module has been loaded. The rest of a file is what runs, so it may be changed. A Triton kernel is
compiled from its text, so that lies there, compressed. Whoever wants to can read both: they are out of sight, not out of reach.
"""

from __future__ import annotations

import ast
import json
import linecache
import marshal
import sys
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "withheld"


def install() -> None:
    """From now on, whatever is loaded from a file is complete. Ends the process with a line if this Python cannot read the byte code."""
    made = json.loads((FOLDER / "made.json").read_text(encoding="utf-8"))
    if made["magic"] != MAGIC_NUMBER.hex():
        here = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"This handout was made for Python {made['python']}, and this is Python {here}; in {ROOT}, run "
            f"`make clean venv PYTHON=python{made['python']}`."
        )
    files = {str(ROOT / name): FOLDER / f"{name}.{kind}" for name, kind in made["files"].items()}
    run = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        sealed = files.get(self.path)
        if sealed is not None and sealed.suffix == ".text":
            show(self.path, json.loads(zlib.decompress(sealed.read_bytes())))
        run(self, module)
        if sealed is not None and sealed.suffix == ".code":
            fill(module, self.path, marshal.loads(sealed.read_bytes()))

    SourceFileLoader.exec_module = exec_module  # type: ignore[assignment, method-assign]


def fill(module: ModuleType, path: str, codes: dict[str, CodeType]) -> None:
    """Put the code into the functions."""
    for name, code in codes.items():
        found: Any = module
        for part in name.split("."):
            found = vars(found)[part]
        while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
            inner = (getattr(found, each, None) for each in ("__wrapped__", "__func__", "fget", "fn", "func"))
            found = next(each for each in inner if each is not None)
        found.__code__ = placed(code, path)


def placed(code: CodeType, path: str) -> CodeType:
    """The code, and all within it, as if it had been compiled from this file."""
    inner = tuple(placed(each, path) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=path, co_consts=inner)


def show(path: str, bodies: dict[str, list[str]]) -> None:
    """Whoever asks Python for the text of the file, as Triton does, gets it with the bodies in the place of the stubs."""
    text = Path(path).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):  # from the end: what stands before keeps its lines
        if isinstance(node, ast.FunctionDef) and node.name in bodies:
            lines[node.body[-1].lineno - 1 : node.body[-1].lineno - 1 + len(bodies[node.name])] = bodies[node.name]
    linecache.cache[path] = (sum(map(len, lines)), None, lines, path)
