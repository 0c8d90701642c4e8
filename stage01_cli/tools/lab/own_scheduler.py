"""A scheduler class of the learner's own: where it comes from, and where in it an error is.

It is executed anew for each simulation, so that a change in its file counts at once and no state stays behind.
"""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from stage03_engine.errors import ConfigError

TEXT_NAME = "your scheduler"  # shown as the file of a class that was typed into the page


class TookTooLong(BaseException):
    """The time for a simulation is over. No `except Exception` of a scheduler catches it."""


class OwnScheduler:
    """`FILE.py:Class` or `module:Class`; or, with `text`, the last class that a piece of Python defines."""

    def __init__(self, path: str = "", text: str | None = None) -> None:
        self._path, self._text = path, text
        self.file = TEXT_NAME if text is not None else path.rpartition(":")[0]

    def load(self) -> type[Any]:
        """Execute the code and return the class. Raises ConfigError if there is none, and whatever the code raises."""
        if self._text is not None:
            return self._load_text(self._text)
        where, colon, name = self._path.rpartition(":")
        if not (where and colon and name):
            raise ConfigError(f"--scheduler-cls must look like FILE.py:Class or module:Class, not {self._path!r}")
        module = self._load_file(Path(where)) if where.endswith(".py") else self._load_module(where)
        found = getattr(module, name, None)
        if not isinstance(found, type):
            raise ConfigError(f"--scheduler-cls {self._path}: {where} has no class {name}")
        return found

    def _load_file(self, path: Path) -> ModuleType:
        try:
            code = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"--scheduler-cls {self._path}: cannot read {path}: {reason}") from error
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        linecache.checkcache(self.file)
        return self._execute(path.stem, code)

    def _load_module(self, name: str) -> ModuleType:
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"--scheduler-cls {self._path}: {error}") from error
        self.file = module.__file__ or name
        linecache.checkcache(self.file)
        return module

    def _load_text(self, text: str) -> type[Any]:
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        module = self._execute("your_scheduler", text)
        classes = [
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        if not classes:
            raise ConfigError("the text defines no class; begin with: class MyScheduler(Scheduler):")
        return classes[-1]

    def _execute(self, name: str, code: str) -> ModuleType:
        module = ModuleType(f"lab_{name}")  # under a name that no other module has
        module.__file__ = self.file
        sys.modules[module.__name__] = module  # dataclasses look their module up
        exec(compile(code, self.file, "exec"), module.__dict__)
        return module

    def describe(self, error: BaseException) -> str:
        """The error in one sentence, with the last line of the learner's that it passed through."""
        said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        if isinstance(error, TookTooLong):
            said = " ".join(str(error).split())
        if isinstance(error, ConfigError):
            return str(error)
        if isinstance(error, SyntaxError) and error.filename == self.file:
            return f"SyntaxError: {error.msg} [{self.file}, line {error.lineno}: {(error.text or '').strip()}]"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        if not frames:
            return said
        return f"{said} [{self.file}, line {frames[-1].lineno}: {(frames[-1].line or '').strip()}]"
