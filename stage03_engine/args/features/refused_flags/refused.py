"""vLLM's flags and request fields that are not supported here: each is refused, except at the value that asks for nothing.

refused.toml lists them all, in a notation that it explains. This module is imported only for an unknown flag, config file key or
request field (vllm/engine/arg_utils.py, vllm/entrypoints/common/cli_args.py).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stage03_engine.errors import ConfigError, InvalidRequestError

_WORD = re.compile(r"([+~]?)((?:-{1,2}[\w-]+,)*--[\w-]+)(\*|=(.*))?")


ANY = "*"
_told: set[str] = set()
logger = logging.getLogger(__name__)


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


def check_fields(fields: Mapping[str, object], table: str) -> set[str]:
    """The fields of a request that are in `table`, or in one of `a+b`. Raises InvalidRequestError for one of these that asks for something
    that would change the answer; one that is ignored at any value is told to the log, once."""
    known = {name: values for each in table.split("+") for name, values in refused_toml()["fields"][each].items()}
    for name, value in fields.items():
        if name not in known or value is None or value in known[name]:
            continue
        if ANY in known[name]:
            if name not in _told:
                _told.add(name)
                logger.warning("The request field %s does nothing here.", name)
        else:
            raise InvalidRequestError(f"{name} is not supported by this server; leave it out.", name)
    return set(known)


class _Refused(argparse.Action):
    """Raises ConfigError for any value but the harmless one. Leaves no trace in the namespace."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, reason: str, harmless: Mapping[str, bool] | str, ignored: bool
    ) -> None:
        nargs = {"[]": "*"}.get(harmless) if isinstance(harmless, str) else 0
        super().__init__(option_strings, dest, nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.refusal, self._harmless, self._ignored = reason, harmless, ignored

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = option_string or ""
        values = json.dumps(values) if isinstance(values, list) and self._harmless == "[]" else values
        accepted = _same(values, self._harmless) if isinstance(self._harmless, str) else self._harmless[flag]
        if not accepted:
            _refuse(flag, self._harmless, self.refusal, self._ignored)


def _refuse(flag: str, harmless: Mapping[str, bool] | str, reason: str, ignored: bool) -> None:
    """Raises ConfigError, or says that the flag does nothing."""
    if ignored:
        print(f"stages: warning: {flag} is ignored: {reason}", file=sys.stderr)
        return
    values = [value for value in harmless.split("|") if value] if isinstance(harmless, str) else []
    but = f" (only {' or '.join(values)} is)" if values else ""
    raise ConfigError(f"{flag} is not supported{but}: {reason}")


def _same(value: str, harmless: str) -> bool:
    """Is it one of the harmless values? Numbers and JSON count as what they say."""
    return any(_meaning(value) == _meaning(each) for each in harmless.split("|"))


def _meaning(text: str) -> object:
    try:
        return json.loads(text) if text.startswith("{") else float(text)
    except (ValueError, RecursionError):
        return text.strip().lower()


def _opposite(flag: str) -> str:
    """`--disable-x` for `--enable-x` and the other way round, else `--no-x`."""
    for word, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(word):
            return other + flag.removeprefix(word)
    return "--no-" + flag.removeprefix("--")


def _read(table: Mapping[str, str]) -> Iterator[tuple[list[str], Mapping[str, bool] | str, str, bool]]:
    """(all names of a flag, the value that is harmless or which of the names are, the reason, is it ignored at any other value?)"""
    for reason, words in table.items():
        for word in words.split():
            mark, names, kind, value = _WORD.fullmatch(word).groups()  # type: ignore[union-attr]
            flags = names.split(",")
            harmless: Mapping[str, bool] | str = value
            if value is None:
                on = mark == "+"
                switched = dict.fromkeys(flags, bool(on or kind)) | {_opposite(flags[-1]): not on or bool(kind)}
                harmless, flags = switched, list(switched)
            yield flags, harmless, reason, mark == "~"


def add_tables(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Make the flags of the tables of these names known to `parser`."""
    add_refused(parser, refused(*names))


def add_refused(parser: argparse.ArgumentParser, table: Mapping[str, str]) -> None:
    """Make the flags of a table known to `parser`, without showing them in its `--help`."""
    for flags, harmless, reason, ignored in _read(table):
        parser.add_argument(
            *flags, action=_Refused, reason=reason, harmless=harmless, ignored=ignored, dest=argparse.SUPPRESS
        )


def accepts_key(names: Sequence[str], name: str, value: object) -> bool:
    """Is `name: value` of a config file a flag of one of the tables of these names? Raises ConfigError when the value asks for something."""
    return accepts_key_of(refused(*names), name, value)


def accepts_key_of(table: Mapping[str, str], name: str, value: object) -> bool:
    """Is `name: value` of a config file a flag of the table? `name` is written with underscores; a switch is true or false.

    Raises ConfigError when the value asks for something.
    """
    flag = "--" + name.replace("_", "-")
    for flags, harmless, reason, ignored in _read(table):
        if flag not in flags:
            continue
        if isinstance(harmless, str):
            accepted = value is None or _same(value if isinstance(value, str) else json.dumps(value), harmless)
        else:
            off = not harmless[flag] or all(harmless.values())
            accepted = value is None or (off if value is False else value is True and harmless[flag])
        if not accepted:
            _refuse(flag, harmless, reason, ignored)
        return True
    return False
