"""vLLM's flags and request fields that are not supported here: each is refused, except at the value that asks for nothing.

refused.toml lists them all, in a notation that it explains. This module is imported only for an unknown flag, config file key or
request field (vllm/engine/arg_utils.py, cli_args.py).
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.plugins import absent_features

_WORD = re.compile(r"(\+?)((?:-{1,2}[\w-]+,)*--[\w-]+)(\*|=(.*))?")


@cache
def refused_toml() -> dict[str, dict[str, Any]]:
    """The tables of refused.toml by name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def refused(*names: str) -> dict[str, str]:
    """The tables of these names in one: reason -> flags."""
    joined: dict[str, str] = {}
    for name in names:
        for reason, flags in refused_toml()[name].items():
            joined[reason] = f"{joined.get(reason, '')} {flags}"
    return joined


def check_unknown_fields(fields: Mapping[str, Any], table: str) -> None:
    """`fields` are those of a request that its model does not have. Raises InvalidRequestError for one that asks for something
    and is in `table`, or that may belong to a feature that is not installed; other unknown fields are ignored, as in vLLM."""
    refused_here, absent = refused_toml()["fields"][table], absent_features("stage02_server")
    for name, value in fields.items():
        if value is None:
            continue
        if name in refused_here:
            if value not in refused_here[name]:
                raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)
        elif absent and value not in (False, 0, "", [], {}):
            raise InvalidRequestError(
                f"{name} is unknown here, where {named(absent)} is not installed; leave it out.", name
            )


def named(absent: Collection[str]) -> str:
    """`a`, `a or b`, or `one of N features`: which of them it was can no longer be told."""
    return " or ".join(absent) if len(absent) < 3 else f"one of {len(absent)} features"


class _Refused(argparse.Action):
    """Raises ConfigError for any value but the harmless one. Leaves no trace in the namespace."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, reason: str, harmless: Mapping[str, bool] | str
    ) -> None:
        nargs = None if isinstance(harmless, str) else 0
        super().__init__(option_strings, dest, nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.refusal, self._harmless = reason, harmless

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = option_string or ""
        accepted = _same(values, self._harmless) if isinstance(self._harmless, str) else self._harmless[flag]
        if not accepted:
            raise ConfigError(_refusal(flag, self._harmless, self.refusal))


def _refusal(flag: str, harmless: Mapping[str, bool] | str, reason: str) -> str:
    but = f" (only {harmless} is)" if harmless and isinstance(harmless, str) else ""
    return f"{flag} is not supported{but}: {reason}"


def _same(value: str, harmless: str) -> bool:
    try:
        return float(value) == float(harmless)
    except ValueError:
        return value.strip().lower() == harmless.lower()


def _opposite(flag: str) -> str:
    """`--disable-x` for `--enable-x` and the other way round, else `--no-x`."""
    for word, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(word):
            return other + flag.removeprefix(word)
    return "--no-" + flag.removeprefix("--")


def _read(table: Mapping[str, str]) -> Iterator[tuple[list[str], Mapping[str, bool] | str, str]]:
    """(all names of a flag, the value that is harmless or which of the names are, the reason)"""
    for reason, words in table.items():
        for word in words.split():
            on, names, kind, value = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
            flags = names.split(",")
            harmless: Mapping[str, bool] | str = value
            if value is None:
                switched = dict.fromkeys(flags, bool(on or kind)) | {_opposite(flags[-1]): not on or bool(kind)}
                harmless, flags = switched, list(switched)
            yield flags, harmless, reason


def add_refused(parser: argparse.ArgumentParser, table: Mapping[str, str]) -> None:
    """Make the flags of a table known to `parser`, without showing them in its `--help`."""
    for flags, harmless, reason in _read(table):
        parser.add_argument(*flags, action=_Refused, reason=reason, harmless=harmless, dest=argparse.SUPPRESS)


def accepts_key(table: Mapping[str, str], name: str, value: object) -> bool:
    """Is `name: value` of a config file a flag of the table? `name` is written with underscores; a switch is true or false.

    Raises ConfigError when the value asks for something.
    """
    flag = "--" + name.replace("_", "-")
    for flags, harmless, reason in _read(table):
        if flag not in flags:
            continue
        if isinstance(harmless, str):
            accepted = value is None or _same(value if isinstance(value, str) else json.dumps(value), harmless)
        else:
            off = not harmless[flag] or all(harmless.values())
            accepted = value is None or (off if value is False else value is True and harmless[flag])
        if not accepted:
            raise ConfigError(_refusal(flag, harmless, reason))
        return True
    return False
