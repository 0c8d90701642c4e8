"""The name of a class of the user's own: `module:Class`, or with a dot instead, as vLLM writes it. Imports nothing of the user's but the
packages around the module: a worker's module needs torch, and settings are checked where there is none."""

from __future__ import annotations

import sys

from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there


def split_path(path: str, flag: str) -> tuple[str, str]:
    """(module, class). Raises ConfigError that names the flag if `path` has neither form."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and name):
        raise ConfigError(f"{flag} must look like module:Class, not {path!r}")
    return module, name


def check_module(path: str, flag: str) -> None:
    """Raises ConfigError that names the flag if `path` has no such form, or if there is no such module."""
    module, _ = split_path(path, flag)
    try:
        found = module in sys.modules or is_there(module)
    except Exception as error:  # of a package around it: somebody else's code
        raise ConfigError(f"{flag} {path}: {type(error).__name__}: {error}") from error
    if not found:
        raise ConfigError(f"{flag} {path}: there is no module {module}")
