"""The student's door: puts the student's own part in place of the project's, in every process of a server.

Python itself loads this file at the start of each process that has this folder on PYTHONPATH, before any import. STAGES_PARTS
says which parts, as JSON: [{"module": "stage03_engine.core.scheduler", "name": "Scheduler", "file": "work/ex05_scheduler.py"}, ...].
When the module has been imported, or as soon after that as the file can be, the name is set to the part in the file, wherever it was
taken to. So the walk needs no line for it, and the file may still import what it replaces.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)
PREFIX = "[course]"
PROJECT = "stage0"  # how the names of its modules begin


class Door:
    """A finder that goes before all others: finds a module as they do, and has the parts set when its code has run."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.parts = parts
        self.files = {student(part["file"]): part["file"] for part in parts}
        self.loading = 0  # modules with parts, and files of parts, whose code is running now
        self.said: list[str] = []
        self.half_loaded = 0  # modules of the stages whose code is running now
        self.waiting: list[tuple[ModuleType, dict[str, Any]]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that sets the parts afterwards; None for all other modules.

        A file of parts is a module, too: work/ex15_feature.py is `student_ex15_feature`, which a flag may name."""
        if name in self.files:
            spec = importlib.util.spec_from_file_location(name, self.files[name])
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module = self.then_set(spec.loader.exec_module, [])  # type: ignore[assignment, method-assign]
            return spec
        if not name.startswith(PROJECT):
            return None
        parts = [part for part in self.parts if part["module"] == name]
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                run = self.then_set(spec.loader.exec_module, parts) if parts else spec.loader.exec_module
                spec.loader.exec_module = self.then_again(run)  # type: ignore[assignment, method-assign]
                return spec
        return None

    def then_again(self, run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        """The loader's own work, and after it another attempt to set what still waits."""

        def exec_module(module: ModuleType) -> None:
            self.half_loaded += 1
            try:
                run(module)
            finally:
                self.half_loaded -= 1
            self.set_waiting()

        return exec_module

    def then_set(self, run: Callable[[ModuleType], None], parts: list[dict[str, Any]]) -> Callable[[ModuleType], None]:
        """The loader's own work, and after it the parts."""

        def exec_module(module: ModuleType) -> None:
            with self.busy():
                run(module)
            self.waiting += [(module, part) for part in parts]
            self.set_waiting()

        return exec_module

    def set_waiting(self) -> None:
        """Set the parts whose modules are complete. A module that another one imports waits for that: the file of its parts may
        import both. So does a module that such a file itself imports; and a file that needs a module which is half loaded."""
        while self.waiting and not self.loading:
            try:
                with self.busy():
                    self.set(*self.waiting[0])
            except (ImportError, AttributeError) as error:
                if self.half_loaded and "partially initialized" in str(error):
                    return
                raise
            del self.waiting[0]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Code inside may set nothing."""
        self.loading += 1
        try:
            yield
        finally:
            self.loading -= 1

    def set(self, module: ModuleType, part: dict[str, Any]) -> None:
        """Put the part that the file defines into the module."""
        own, reference = importlib.import_module(student(part["file"])), getattr(module, part["name"])
        if part.get("keep"):
            self.guard(module, part, own)
        # Others may have taken the reference's name while the part was waiting.
        for each in [each for name, each in sys.modules.items() if name.startswith(PROJECT)]:
            for name in [name for name, value in vars(each).items() if value is reference]:
                setattr(each, name, getattr(own, part["name"]))
        where = f"{module.__name__}.{part['name']}"
        print(f"{PREFIX} {where} is now the one in {part['file']} (process {os.getpid()})", file=sys.stderr, flush=True)

    def guard(self, module: ModuleType, part: dict[str, Any], own: ModuleType) -> None:
        """Say so once, in the server's log, when the student's part has its answer from the one that it replaces."""
        from stage01_cli.tools.course.guard import Guard

        guard = Guard(Path(part["file"]), {part["name"]: getattr(own, part["name"])}, self.say_once)
        for name in part["keep"]:
            guard.keep(module, name)

    def say_once(self, text: str) -> None:
        """A line of the log."""
        if text not in self.said:
            self.said.append(text)
            print(f"{PREFIX} {text}", file=sys.stderr, flush=True)


def student(file: str) -> str:
    """The name of the module in a file of parts."""
    return f"student_{Path(file).stem}"


def next_sitecustomize() -> Any:
    """This file hides another of the same name, further along the path: run that one too."""
    elsewhere = [folder for folder in sys.path if folder != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("STAGES_PARTS"):
    sys.meta_path.insert(0, Door(json.loads(os.environ["STAGES_PARTS"])))
next_sitecustomize()
