"""Settings in the YAML file that `--config` names (vLLM: FlexibleArgumentParser.load_config_file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from stage03_engine.args.fields import Setting
from stage03_engine.args.parser import did_you_mean
from stage03_engine.args.unknown import refuse_absent
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find


def read_config_file(path: str, settings: Sequence[Setting], refused_tables: Sequence[str]) -> dict[str, Any]:
    """The mapping in the file, its keys written with underscores. Raises ConfigError.

    A key may be a flag of `refused_tables` at a value that asks for nothing.
    """
    known = {setting.name for setting in settings}
    switches = {setting.name for setting in settings if setting.kind is bool}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in known and isinstance(value, bool) and (other := _opposite(name)) in switches:
            name, value = other, not value
        if name in values:
            raise ConfigError(f"config file {path}: {name} is given twice")
        if name in known:
            values[name] = value
        elif not _asks_for_nothing(path, name, value, refused_tables):
            refuse_absent("--" + name.replace("_", "-"))
            raise ConfigError(f"config file {path}: unknown key {key!r}{did_you_mean(name, known)}")
    return values


def _opposite(name: str) -> str:
    """`disable_x` for `enable_x` and the other way round, `x` for `no_x`: a key may be what a flag may be."""
    for word, other in (("enable_", "disable_"), ("disable_", "enable_"), ("no_", "")):
        if name.startswith(word):
            return other + name.removeprefix(word)
    return ""


def _mapping(path: str) -> dict[object, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that cannot be
        raise ConfigError(f"config file {path} is not YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold a mapping such as `max-num-seqs: 64`")
    return content or {}


def _asks_for_nothing(path: str, name: str, value: object, refused_tables: Sequence[str]) -> bool:
    accepts_key = find("engine", "refused_keys")
    try:
        return accepts_key is not None and accepts_key(refused_tables, name, value)
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from None
