"""The command line of stage 4: check, compile, bench, roofline. vLLM has no such commands; its checks are in its tests."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from stage04_kernels.attention import load

COMMANDS = {
    "check": "stage04_kernels.lab.commands:Check",
    "compile": "stage04_kernels.lab.commands:Compile",
    "bench": "stage04_kernels.lab.commands:Bench",
    "roofline": "stage04_kernels.lab.commands:Roofline",
}
"""Subcommand -> the class that has its `help`, its `add_arguments(parser)` and its `run(args)`."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def make_parser() -> Parser:
    """The subcommands and their flags. Raises ImportError if the lab was removed."""
    parser = Parser(
        prog="python -m stage04_kernels", description="tensor functions: paged attention, KV write, sampler"
    )
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, where in COMMANDS.items():
        command = load(where)
        subparser = subparsers.add_parser(name, help=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Exits with 2 if the command line is wrong."""
    try:
        parser = make_parser()
    except ImportError as error:
        print(f"python -m stage04_kernels: its commands are not installed: {error}", file=sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
