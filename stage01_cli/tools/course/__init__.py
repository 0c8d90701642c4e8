"""The course, in a notebook: `import stage01_cli.tools.course as course`, then `course.check(5)`. calls.py has the functions; they are
loaded when the first is called, because every command looks into this folder for its manifest."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("stage01_cli.tools.course.calls"), name)
