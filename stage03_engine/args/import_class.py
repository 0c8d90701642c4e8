"""Parts of the engine that a user brings: `--scheduler-cls module:Class` and others (vLLM: resolve_obj_by_qualname)."""

from __future__ import annotations

import importlib
from typing import Any

from stage03_engine.errors import ConfigError


def import_class(path: str, flag: str) -> Any:
    """The class that `module:Name` names. Raises ConfigError that names the flag if the import fails or finds no class."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{flag} must look like module:Class, not {path!r}")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{flag} {path}: this is not a class")
    return found


def construct(path: str, flag: str, *args: Any) -> Any:
    """An object of the class that `module:Name` names. Raises ConfigError that names the flag, whatever its code raises."""
    found = import_class(path, flag)
    try:
        return found(*args)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: {type(error).__name__}: {error}") from error
