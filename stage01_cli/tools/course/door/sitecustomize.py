"""The student's door: puts a part of one's own in the place of the project's, in every process of a server.

Python itself loads this file at the start of each process that has this folder on PYTHONPATH, before any import. STAGES_PARTS
says which parts, as JSON: [{"module": "stage03_engine.core.scheduler", "name": "Scheduler", "file": "work/ex05_scheduler.py"}, ...].
When the module has been imported, and before anybody can take the name from it, the name is set to the part in the file. So
the walk needs no line for it, and the file may still import what it replaces.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)
PREFIX = "[course]"


class Door:
    """A finder that goes before all others: finds a module as they do, and has the parts set when its code has run."""

    def __init__(self, parts: list[dict[str, str]]) -> None:
        self.parts = parts
        self.files: dict[str, ModuleType] = {}
        self.waiting: list[tuple[ModuleType, dict[str, str]]] = []
        self.running = 0  # modules with parts, and files of parts, that are in the middle of their imports

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that sets the parts afterwards; None for all other modules."""
        parts = [part for part in self.parts if part["module"] == name]
        if not parts:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = self.then_set(spec.loader.exec_module, parts)  # type: ignore[assignment, method-assign]
                return spec
        return None

    def then_set(self, run: Callable[[ModuleType], None], parts: list[dict[str, str]]) -> Callable[[ModuleType], None]:
        """The loader's own work, and after it the parts."""

        def exec_module(module: ModuleType) -> None:
            self.running += 1
            run(module)
            self.running -= 1
            self.waiting += [(module, part) for part in parts]
            while self.waiting and not self.running:  # they may import each other
                self.set(*self.waiting.pop(0))

        return exec_module

    def set(self, module: ModuleType, part: dict[str, str]) -> None:
        """Put the part that the file defines into the module."""
        own, reference = self.load(part["file"]), getattr(module, part["name"])
        # The file's own imports may have made others take the reference's name a moment ago.
        early = [each for name, each in sys.modules.items() if name.startswith("stage0")]
        for each in {id(each): each for each in [module, *early]}.values():
            if getattr(each, part["name"], None) is reference:
                setattr(each, part["name"], getattr(own, part["name"]))
        where = f"{module.__name__}.{part['name']}"
        print(f"{PREFIX} {where} is now the one in {part['file']} (process {os.getpid()})", file=sys.stderr, flush=True)

    def load(self, file: str) -> ModuleType:
        """The module in this file, loaded once."""
        if file not in self.files:
            name = f"student_{Path(file).stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = self.files[file] = importlib.util.module_from_spec(spec)
            self.running += 1
            spec.loader.exec_module(self.files[file])
            self.running -= 1
        return self.files[file]


def next_sitecustomize() -> Any:
    """This file hides another of the same name, further along the path: run that one too."""
    elsewhere = [folder for folder in sys.path if folder != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("STAGES_PARTS"):
    sys.meta_path.insert(0, Door(json.loads(os.environ["STAGES_PARTS"])))
next_sitecustomize()
