"""Classes of the user's own, which flags name as `module:Class`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from stage03_engine.errors import ConfigError


def import_class(path: str, flag: str) -> Any:
    """A class of the user's own, which `module:Name` names (vLLM: resolve_obj_by_qualname). Raises ConfigError that names the flag if the import fails or finds no class."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{flag} must look like module:Class, not {path!r}")
    try:
        found = getattr(import_module(module_name), name)
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
