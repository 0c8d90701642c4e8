"""`python -m stagetrace COMMAND RUN`: look at recordings without the stages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from stagetrace.commands import add_commands, run_chosen
from stagetrace.errors import TraceError
from stagetrace.terminal import HelpFormatter, complain, quiet_pipe, whole_words


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **({"formatter_class": HelpFormatter} | kwargs))

    def error(self, message: str) -> NoReturn:
        raise TraceError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, 2 for what the user can fix."""
    parser = _Parser(prog="python -m stagetrace", description="Look at recordings of the stages (RUN is their folder).")
    add_commands(parser)
    with quiet_pipe(), whole_words():
        try:
            return run_chosen(parser.parse_args(argv))
        except TraceError as error:
            complain("stagetrace", " ".join(str(error).split()))
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
