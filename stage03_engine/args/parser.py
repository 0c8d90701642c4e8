"""The argument parser of every command (vLLM: FlexibleArgumentParser)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from stage03_engine.errors import ConfigError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean --port?` when a known word is close to `word`, else an empty string."""
    import difflib  # only needed on the way to an error

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads `--max_num_seqs` as `--max-num-seqs` and says in one line what is wrong.

    Flags cannot be abbreviated: a script that says `--max-num` would change its meaning when a flag is added. Every
    refusal, unknown flags included, is a ConfigError.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ArgumentParser's, but nothing unknown is let through: argparse calls this for the parser of a subcommand,
        and only that parser knows which flags are near to the unknown one. Raises ConfigError."""
        if args is None:
            import sys

            args = sys.argv[1:]
        parsed, unknown = super().parse_known_args(_with_dashes(args), namespace)
        if unknown:
            self._refuse(unknown)
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage dump."""
        raise ConfigError(message)

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flags = [word for word in unknown if word.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}; see {self.prog} --help")
        flag = flags[0].partition("=")[0]
        suggestion = did_you_mean(flag, self._option_string_actions)
        self.error(f"unknown flag {flag}" + (suggestion or f"; see {self.prog} --help"))


def _with_dashes(args: Sequence[str]) -> list[str]:
    """`--a_b=c_d` -> `--a-b=c_d`. What stands after a bare `--` is left alone."""
    result: list[str] = []
    for position, word in enumerate(args):
        if word == "--":
            return result + list(args[position:])
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        result.append(word)
    return result
