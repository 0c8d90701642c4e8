"""The argument parser of every command (vLLM: FlexibleArgumentParser)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from stage03_engine.args.unknown import refuse_absent
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import find
from stagetrace.terminal import HelpFormatter


def check_keys(setting: str, given: Iterable[object], known: Collection[str], where: str = "") -> None:
    """Raises ConfigError that names the first unknown key of a JSON setting; `where` is the path to it."""
    for key in given:
        if key not in known:
            raise ConfigError(f"{setting}: unknown key {where + str(key)[:200]!r}{did_you_mean(str(key), known)}")


def did_you_mean(word: str, known: Iterable[str], works: Callable[[str], bool] = lambda name: True) -> str:
    """`; did you mean --port?` if the known word closest to `word` is close enough and useful (`works`); else an empty string."""
    import difflib  # only needed on the way to an error

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close and works(close[0]) else ""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads `--max_num_seqs` as `--max-num-seqs`, and says in one line what is wrong.

    Flags cannot be abbreviated: a script that says `--max-num` would change its meaning when a flag is added. Every
    refusal, unknown flags included, is a ConfigError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        usual: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(*args, **usual | kwargs)
        self._refused: list[str] = []  # names of tables that are not read yet

    def refuse(self, *tables: str) -> None:
        """Also know the flags in these tables, those of vLLM's that are not built. They are read only when an unknown flag comes."""
        self._refused.extend(tables)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ArgumentParser's, but nothing unknown is let through: argparse calls this for the parser of a subcommand,
        and only that parser knows which flags are near to the unknown one. Raises ConfigError."""
        words = with_dashes(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            self._help_with(words)
        if any("." in flag for flag in _flags(words)) and (joined := find("engine", "keyed_flags")):
            words = joined(words)
        if self._refused and any(flag not in self._option_string_actions for flag in _flags(words)):
            if add_tables := find("engine", "refused_flags"):
                add_tables(self, self._refused)
            self._refused = []
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, []

    def _help_with(self, words: Sequence[str]) -> None:
        """`--help=WORD` prints a part of the help and exits."""
        word = next((word for word in words if word.startswith("--help=")), None)
        if word is not None and (part_of_help := find("engine", "part_of_help")):
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


def _flags(words: Sequence[str]) -> list[str]:
    """The flags among the words, without their values. What follows a bare `--` is none."""
    given = takewhile(lambda word: word != "--", words)
    return [word.partition("=")[0] for word in given if word.startswith("-")]


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
