"""Classes of the user's own, which flags name as `module:Class` or `module.Class`."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from stage03_engine.core.features.own_classes.class_path import split_path
from stage03_engine.errors import ConfigError, StagesError


def import_class(path: str, flag: str, base: type | None = None) -> Any:
    """A class of the user's own (vLLM: resolve_obj_by_qualname). Raises ConfigError that names the flag if the import fails, whatever the
    module's code raises, finds no class, or one that does not inherit from `base`."""
    module_name, name = split_path(path, flag)
    try:
        found = attrgetter(name)(import_module(module_name))
    except Exception as error:
        raise ConfigError(f"{flag} {path}: {_said(error, (ImportError, AttributeError))}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{flag} {path}: this is not a class")
    if base is not None and not issubclass(found, base):
        raise ConfigError(f"{flag} {path}: not a subclass of {base.__module__}:{base.__name__}")
    return found


def construct(path: str, flag: str, *args: Any, base: type | None = None) -> Any:
    """An object of that class. Raises ConfigError that names the flag, whatever its code raises."""
    found = import_class(path, flag, base)
    try:
        return found(*args)
    except Exception as error:
        raise ConfigError(f"{flag} {path}: {_said(error, (StagesError,))}") from error


def _said(error: Exception, plain: tuple[type[Exception], ...]) -> str:
    """An error in one line; without its type where the text says enough."""
    text = " ".join(str(error).split())
    return text if isinstance(error, plain) else f"{type(error).__name__}: {text}"
