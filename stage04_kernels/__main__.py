"""The command line of stage 4: `python -m stage04_kernels check`. vLLM has no such command; its checks live in its tests."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from stagetrace import trace

if TYPE_CHECKING:
    from stage04_kernels.check_row import Row


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def seed_number(text: str) -> int:
    """A seed that still fits into 64 bits when the checks count up from it."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [0, 2^63)")
    return int(text)


def make_parser() -> Parser:
    """The subcommands and flags of this stage."""
    parser = Parser(
        prog="python -m stage04_kernels", description="tensor functions: paged attention, KV write, sampler"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check}")
    check = commands.add_parser("check", help="compare every fast path with its slow twin and print a table")
    check.add_argument("--seed", type=seed_number, default=0, help="seed of the random cases (default 0)")
    check.add_argument("--trace", metavar="DIR", help="folder to write a trace file to")
    return parser


HEADER = ("what", "checked against", "cases", "dtype", "max abs error", "tolerance", "ok")
LINE = "{:<48} {:<28} {:>5}  {:<9} {:>13}  {:<20} {}"


def render(row: Row) -> str:
    """One line of the table."""
    ok = "ok" if row.ok else "WRONG"
    return LINE.format(row.what, row.against, row.cases, row.dtype, f"{row.max_error:.1e}", str(row.tolerance), ok)


def run_check(seed: int) -> int:
    """Print the table while it is computed. Returns the exit code: 0 if every row is ok, else 1."""
    import torch

    from stage04_kernels.check import run_checks

    torch.set_num_threads(1)  # the cases are small: a second thread would only wait, and disturb what else runs here
    print(LINE.format(*HEADER))
    total = wrong = 0
    for row in run_checks(seed):
        print(render(row), flush=True)
        total += 1
        wrong += not row.ok
    print(f"{total} rows, {wrong} wrong")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Exits with 2 when the command line is wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.trace is not None:
        trace.hold("Kernels")
        try:
            trace.open(args.trace, seed=args.seed)
        except OSError as error:
            trace.drop()
            parser.error(f"cannot write traces to {args.trace!r}: {error.strerror or error}")
    try:
        return run_check(args.seed)
    finally:
        trace.close()


if __name__ == "__main__":
    sys.exit(main())
