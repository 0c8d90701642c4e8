"""The argument parser of every command (vLLM: FlexibleArgumentParser)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from stage03_engine.errors import ConfigError


def did_you_mean(word: str, known: Iterable[str], works: Callable[[str], bool] = lambda name: True) -> str:
    """`; did you mean --port?` when a known word is close to `word`, and the closest one is of any use (`works`); else an
    empty string."""
    import difflib  # only needed on the way to an error

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close and works(close[0]) else ""


def refuse_absent(name: str) -> None:
    """Raises ConfigError if a feature is not installed to which this unknown flag, variable or key may belong."""
    from stage03_engine.args.refused import named  # only needed on the way to an error
    from stage03_engine.plugins import absent_features

    if absent := absent_features():
        raise ConfigError(f"{name} is unknown here, where {named(absent)} is not installed")


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads `--max_num_seqs` as `--max-num-seqs`, puts `--pooler-config.dimensions 8` into
    `--pooler-config '{"dimensions": 8}'`, and says in one line what is wrong.

    Flags cannot be abbreviated: a script that says `--max-num` would change its meaning when a flag is added. Every
    refusal, unknown flags included, is a ConfigError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._refused: list[str] = []  # tables of refused.toml that are not read yet

    def refuse(self, *tables: str) -> None:
        """Know the flags of these tables of refused.toml too. The file is read only when an unknown flag is met."""
        self._refused.extend(tables)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ArgumentParser's, but nothing unknown is let through: argparse calls this for the parser of a subcommand,
        and only that parser knows which flags are near to the unknown one. Raises ConfigError."""
        if args is None:
            import sys

            args = sys.argv[1:]
        if self._subparsers is None:
            self._help_with(args)
        words = _joined(with_dashes(args))
        if self._refused and self._has_unknown_flags(words):
            from stage03_engine.args.refused import add_refused, refused

            add_refused(self, refused(*self._refused))
            self._refused = []
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, []

    def _has_unknown_flags(self, words: Sequence[str]) -> bool:
        flags = (word.partition("=")[0] for word in takewhile(lambda word: word != "--", words) if word.startswith("-"))
        return any(flag not in self._option_string_actions for flag in flags)

    def _help_with(self, args: Sequence[str]) -> None:
        """`--help=WORD` prints a part of the help and exits."""
        word = next((word for word in args if word.startswith("--help=")), None)
        if word is not None:
            print(part_of_help(self, word.partition("=")[2]), end="")
            self.exit()

    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage dump."""
        raise ConfigError(message)

    def _works(self, flag: str) -> bool:
        """False for a flag that is refused, and for one whose help says that it is not built."""
        action = self._option_string_actions[flag]
        return not hasattr(action, "refusal") and "built" not in (action.help or "")

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flags = [word for word in unknown if word.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}; see {self.prog} --help")
        flag = flags[0].partition("=")[0]
        refuse_absent(flag)
        suggestion = did_you_mean(flag, self._option_string_actions, self._works)
        self.error(f"unknown flag {flag}" + (suggestion or f"; see {self.prog} --help"))


def with_dashes(args: Sequence[str]) -> list[str]:
    """`--a_b.k_e=c_d` -> `--a-b.k_e=c_d`. What follows a bare `--` is left alone."""
    result: list[str] = []
    for position, word in enumerate(args):
        if word == "--":
            return result + list(args[position:])
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag, dot, keys = name.partition(".")
            word = flag.replace("_", "-") + dot + keys + equals + value
        result.append(word)
    return result


def _joined(args: Sequence[str]) -> list[str]:
    """`--x.a.b 1 --x.c y` -> `--x {"a": {"b": 1}, "c": "y"}`: a setting that is JSON, key by key. Raises ConfigError."""
    result: list[str | dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        flag, dot, keys = name.partition(".")
        if word == "--":
            result.extend([word, *words])
        elif not (word.startswith("--") and dot):
            result.append(word)
        else:
            if flag not in found:
                found[flag] = {}
                result.extend([flag, found[flag]])
            if not equals and (following := next(words, None)) is not None:
                equals, value = "=", following
            if not equals or not _put(found[flag], keys.split("."), value):
                raise ConfigError(f"{name} needs a value, and a key that is not given twice")
    for flag in found:
        if result.count(flag) > 1 or any(isinstance(word, str) and word.startswith(flag + "=") for word in result):
            raise ConfigError(f"{flag} is given both whole and key by key")
    return [word if isinstance(word, str) else json.dumps(word) for word in result]


def _put(place: dict[str, Any], keys: list[str], text: str) -> bool:
    """Store the JSON (or the plain text) at a path of keys; False when there is something already, or a key is empty."""
    *path, last = keys
    for key in path:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            return False
    if last in place or "" in keys:
        return False
    try:
        place[last] = json.loads(text)
    except (ValueError, RecursionError):
        place[last] = text
    return True


def part_of_help(parser: argparse.ArgumentParser, word: str) -> str:
    """What `--help=WORD` prints: the groups (`listgroup`), one group by its name, or all flags with `word` in their names. Raises ConfigError."""
    groups = {
        group: [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        for group in parser._action_groups
    }
    shown = {group: actions for group, actions in groups.items() if actions}
    formatter = parser._get_formatter()
    if word == "listgroup":
        chosen: dict[argparse._ArgumentGroup, list[argparse.Action]] = {group: [] for group in shown}
    else:
        chosen = {group: actions for group, actions in shown.items() if (group.title or "").lower() == word.lower()}
        chosen = chosen or _with_flags_like(shown, word.lstrip("-").replace("_", "-").lower())
    if not chosen:
        raise ConfigError(f"no group and no flag has {word!r} in its name; see {parser.prog} --help=listgroup")
    for group, actions in chosen.items():
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _with_flags_like(
    groups: dict[argparse._ArgumentGroup, list[argparse.Action]], word: str
) -> dict[argparse._ArgumentGroup, list[argparse.Action]]:
    found = {
        group: [action for action in actions if word and any(word in flag for flag in action.option_strings)]
        for group, actions in groups.items()
    }
    return {group: actions for group, actions in found.items() if actions}
