"""Dataclass fields as settings: one field is a flag, an environment variable and a config file key.

Source: vllm/engine/arg_utils.py (get_kwargs, which derives vLLM's flags from its config classes).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from inspect import get_annotations
from typing import Any

from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)", re.ASCII)
_SUFFIXES = {"": 1} | {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
_SUFFIXES |= {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
_INT_LIMIT = 2**63  # settings travel as msgpack, whose integers have 64 bits
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def parse_int(text: str) -> int:
    """`2048`, or with a suffix as in vLLM: `2k` = 2,000 and `2K` = 2,048 (also m M g G t T; `1.5k` but not `1.5K`).

    Raises ValueError.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an integer")
    number, suffix = match.groups()
    value = Decimal(number) * _SUFFIXES[suffix]
    if value != value.to_integral_value() or ("." in number and not suffix.islower()):
        raise ValueError(f"{text!r} is not an integer")
    return int(value)


def parse_float(text: str) -> float:
    """A finite number. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def parse_bool(text: str) -> bool:
    """true/false, yes/no, on/off, 1/0. Raises ValueError."""
    if text.strip().lower() not in _BOOLS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _BOOLS[text.strip().lower()]


def parse_list(text: str) -> tuple[Any, ...]:
    """A JSON list, or else one word. Raises ValueError."""
    if not text.lstrip().startswith("["):
        return (text,)
    return tuple(_json(text))


def parse_dict(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    value = _json(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a character, such as "\\ud800", cannot be passed on
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:200]!r} is not JSON ({error})") from None


def parser_of(kind: type) -> Callable[[str], Any]:
    """What reads the text of a setting of this kind."""
    parsers: dict[type, Callable[[str], Any]] = {
        int: parse_int, float: parse_float, bool: parse_bool, str: str, tuple: parse_list, dict: parse_dict,
    }  # fmt: skip
    return parsers[kind]


_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", tuple: "TEXT", dict: "JSON"}
_NAMES = {
    int: "an integer", float: "a number", bool: "true or false", str: "text", tuple: "a list of texts",
    dict: "a mapping",
}  # fmt: skip


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    at_least: float | None = None,
    protects: bool = False,
) -> Any:
    """A dataclass field that is also a command line flag; `aliases` are further names of the flag. If it `protects`, an empty text
    is refused: it must not leave open what should be closed."""
    metadata = {"help": help, "choices": choices, "aliases": aliases, "at_least": at_least, "protects": protects}
    return dataclasses.field(default=default, metadata=metadata)


def internal(default: Any) -> Any:
    """A dataclass field that is computed, not a flag."""
    return dataclasses.field(default=default, metadata={"internal": True})


@dataclass(frozen=True)
class Setting:
    """One setting: what its flag, its environment variable and its config file key may hold."""

    name: str
    kind: type  # int, float, bool, str, tuple (of texts) or dict
    optional: bool  # None is a value too, written `none`
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    secret: bool = False  # the value is never shown; the field says repr=False
    aliases: tuple[str, ...] = ()  # further names of the flag
    at_least: float | None = None  # checked when the value is final: it may be detected
    protects: bool = False  # an empty text is refused, also in its environment variable

    @property
    def flag(self) -> str:
        """`--max-num-seqs`"""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`STAGES_MAX_NUM_SEQS`"""
        return "STAGES_" + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value that `text` stands for. Raises ValueError that says what is wrong with it."""
        if vllms := find("engine", "vllms_words"):
            text = vllms(self.name, text)
        if self.optional and text.strip().lower() == "none":
            return None
        return self._checked(parser_of(self.kind)(text))

    def accept(self, value: Any) -> Any:
        """A value that already has a type: from YAML, or a keyword argument. Raises ValueError as `parse` does."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, type) and self.kind is str:  # a class, where its name may be given
            value = f"{value.__module__}:{value.__qualname__}"
        if isinstance(value, str) or (self.kind is int and value == -1):
            return self.parse(str(value))
        if value is None and self.optional:
            return None
        if self.kind is tuple and isinstance(value, list):
            # A flag with several values gives a list of words; a single word may be a whole JSON list.
            value = self.parse(value[0]) if len(value) == 1 and isinstance(value[0], str) else tuple(value)
        if self.kind is float and type(value) is int:
            value = float(str(value))  # float(10**400) raises OverflowError; by way of text it is inf, refused below
        return self._checked(value)

    def _checked(self, value: Any) -> Any:
        actual: type = type(value)
        if actual is not self.kind:  # not isinstance: True is an int for Python, but not for a user
            raise ValueError(f"{value!r} is not {_NAMES[self.kind]}")
        if self.kind is float and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        if self.kind is int and not -_INT_LIMIT <= value < _INT_LIMIT:
            raise ValueError(f"{value} is not a 64-bit integer")
        if self.kind is tuple and not all(isinstance(item, str) and item for item in value):
            raise ValueError(f"{list(value)!r} is not a list of non-empty texts")
        if self.protects and not value:
            raise ValueError("it is empty; give it a value, or leave it out")
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        return value


def own_first(section: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass: the walk's own before those that features add to it (`with_features`)."""
    own = get_annotations(section) or get_annotations(section.__mro__[1])
    return sorted(dataclasses.fields(section), key=lambda field: field.name not in own)


_SETTINGS: dict[type, list[Setting]] = {}


def settings_of(section: type) -> Sequence[Setting]:
    """The settings of a config dataclass, in order. Fields marked internal are computed, not set."""
    if section in _SETTINGS:
        return _SETTINGS[section]
    hints = typing.get_type_hints(section)
    settings = []
    for field in own_first(section):
        if field.metadata.get("internal"):
            continue
        kind, optional = _kind_of(hints[field.name])
        meta = field.metadata
        settings.append(
            Setting(
                field.name, kind, optional, field.default, meta["help"], meta.get("choices"), not field.repr,
                meta.get("aliases", ()), meta.get("at_least"), meta.get("protects", False),
            )
        )  # fmt: skip
    _SETTINGS[section] = settings
    return settings


def check_at_least(section: Any) -> None:
    """Raises ConfigError for the first setting of this config dataclass that is less than it may be."""
    for setting in settings_of(type(section)):
        value = getattr(section, setting.name)
        if setting.at_least is not None and value is not None and not value >= setting.at_least:  # NaN is refused too
            raise ConfigError(f"{setting.name} must be at least {setting.at_least}, not {value}")


def _kind_of(hint: Any) -> tuple[type, bool]:
    """`tuple[str, ...] | None` -> (tuple, True)"""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (inner,) = [member for member in members if member is not types.NoneType]
    return typing.get_origin(inner) or inner, types.NoneType in members


def add_flags(parser: argparse.ArgumentParser, section: type) -> None:
    """Add one flag per setting of `section`, in a group of its own.

    A flag that is not given leaves no trace in the namespace (SUPPRESS): that shows later which flags were given. Raises ConfigError for
    a flag that there is already.
    """
    if not (settings := settings_of(section)):
        return  # all of it is computed
    group = parser.add_argument_group(section.__name__, (section.__doc__ or "").partition("\n")[0])
    for setting in settings:
        if setting.flag in parser._option_string_actions:
            raise ConfigError(f"two features have a setting {setting.name}: delete one of them")
        shown = " ".join(setting.default) if setting.kind is tuple and setting.default else setting.default
        default = "" if shown in (None, (), "") else f" (default: {shown})"
        common: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
        common["help"] = (setting.help + default).replace("%", "%%")
        if setting.kind is bool:
            names = (setting.flag, *setting.aliases)
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
            _add_opposite(group, setting)
            continue
        metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else _METAVARS[setting.kind]
        if setting.kind is tuple:
            group.add_argument(setting.flag, nargs="+", action="extend", metavar=metavar, **common)
        else:
            names = (setting.flag, *setting.aliases)
            group.add_argument(*names, type=_argparse_type(setting), metavar=metavar, **common)


def _add_opposite(group: argparse._ArgumentGroup, setting: Setting) -> None:
    """`--disable-x` beside `--enable-x`, and the other way round: vLLM's names for what `--no-enable-x` says too."""
    for word, opposite in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if setting.flag.startswith(word):
            flag = opposite + setting.flag.removeprefix(word)
            silent = argparse.SUPPRESS  # --help says it once for all of them
            group.add_argument(flag, action="store_false", dest=setting.name, default=silent, help=silent)


def _argparse_type(setting: Setting) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return setting.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
