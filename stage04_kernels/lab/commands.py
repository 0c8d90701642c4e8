"""The commands of `python -m stage04_kernels`: their flags, and what each prints.

Nothing here imports torch or Triton before a command runs: whether Triton compiles or interprets is decided by then. And a machine that
has nothing but torch, Triton and numpy runs all of them: the trace is imported where it is asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from stage04_kernels.lab.check_row import Row

Found = TypeVar("Found")
CHIP_NAMES = ("sm_80", "sm_90", "gfx942")


class Check:
    """Every fast path against its slow twin."""

    help = "compare every fast path with its slow twin and print a table"
    header = ("what", "checked against", "cases", "dtype", "max abs error", "tolerance", "ok")
    line = "{:<60} {:<28} {:>5}  {:<9} {:>13}  {:<20} {}"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Its flags."""
        parser.add_argument("--seed", type=seed_number, default=0, help="seed of the random cases (default 0)")
        parser.add_argument("--only", action="append", choices=("attention", "layers", "sampling", "adapters", "triton"),
                            help="a part of the table; may be repeated")  # fmt: skip
        parser.add_argument("--trace", metavar="DIR", help="folder to write a trace file to")
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), default="cpu", help="cpu interprets the Triton kernels (default)"
        )

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Print the table, and record it if asked to. Returns 0 if every row is ok, else 1."""
        if args.trace is None:
            return cls.print_table(args.seed, args.device, args.only)
        try:
            from stagetrace import trace
        except ImportError as error:
            raise argparse.ArgumentTypeError(f"--trace needs the whole project installed: {error}") from error
        trace.hold("Kernels")
        try:
            trace.open(args.trace, seed=args.seed)
        except OSError as error:
            trace.drop()
            reason = f"cannot write traces to {args.trace!r}: {error.strerror or error}"
            raise argparse.ArgumentTypeError(reason) from error

        def record(row: Row) -> None:
            if trace.on:
                trace.emit("kernel.checked", what=row.what, against=row.against, cases=row.cases,
                           max_error=row.max_error, ok=row.ok)  # fmt: skip

        try:
            return cls.print_table(args.seed, args.device, args.only, record)
        finally:
            trace.close()

    @classmethod
    def print_table(
        cls, seed: int, device: str = "cpu", parts: list[str] | None = None,
        record: Callable[[Row], None] = lambda row: None,
    ) -> int:  # fmt: skip
        """Print and record each row as soon as it is computed. Returns 0 if every row is ok, else 1."""
        if device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        import torch

        from stage04_kernels.lab.check import run_checks

        torch.set_num_threads(1)  # the cases are small: a second thread would only wait, and disturb other processes
        print(cls.line.format(*cls.header))
        total = wrong = 0
        for row in printed(run_checks(seed, parts), "check", cls.render):
            record(row)
            total += 1
            wrong += not row.ok
        print(f"{total} rows, {wrong} wrong")
        return 1 if wrong else 0

    @classmethod
    def render(cls, row: Row) -> str:
        """One line of the table."""
        error, ok = f"{row.max_error:.1e}", "ok" if row.ok else "WRONG"
        return cls.line.format(row.what, row.against, row.cases, row.dtype, error, str(row.tolerance), ok)


class Compile:
    """Every Triton kernel for chips that need not be present."""

    help = "compile the Triton kernels for chips that need not be present, and print the resources that they use"
    header = (
        "chip",
        "kernel",
        "dtype",
        "registers",
        "spills",
        "shared",
        "K/V buffers",
        "wide loads",
        "matrix ops",
        "int = 1",
        "budget",
    )
    line = "{:7} {:47} {:5} {:>9} {:>6} {:>7} {:>11} {:>10} {:>10} {:>7}  {}"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Its flags."""
        parser.add_argument("--chip", action="append", choices=CHIP_NAMES, help="may be repeated; all if not given")
        parser.add_argument("--full", action="store_true", help="every kernel in every number format and for every kind of arguments, "
                            "compiled to the end; takes minutes")  # fmt: skip

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Print the resources of every kernel on every chip. Returns 1 if one breaks its budget; gfx942 never does."""
        os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: an interpreted kernel cannot be compiled
        from stage04_kernels.lab.compile import run_compile

        print(cls.line.format(*cls.header))
        broken = 0
        for found in run_compile(args.chip or list(CHIP_NAMES), args.full):
            broken += bool(found.problems) and found.chip != "gfx942"
            numbers = (
                found.registers,
                found.spilled_bytes,
                found.shared_bytes,
                found.kv_buffers,
                found.wide_loads,
                found.matrix_ops,
            )
            shown = ("-" if number < 0 else number for number in numbers)
            budget = "; ".join(found.problems) or "ok"
            print(cls.line.format(found.chip, found.variant, found.dtype, *shown, found.with_ones, budget), flush=True)
        print(f"{broken} over budget")
        return 1 if broken else 0


class Bench:
    """Kernels against the alternatives."""

    help = "measure kernels against the alternatives; on a GPU check them first"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Its flags."""
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default cpu)")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print one line per measurement. On a GPU the checks come first, and a wrong kernel is not measured."""
        import torch

        if args.device == "cuda":
            if not torch.cuda.is_available():
                print("python -m stage04_kernels: --device cuda: torch finds no usable GPU", file=sys.stderr)
                return 2
            if Check.print_table(0, "cuda"):
                return 1
        else:
            from stage04_kernels.backends.native.library import problem

            if (why := problem()) is not None:
                print(f"python -m stage04_kernels: bench on a CPU measures what is compiled: {why}", file=sys.stderr)
                return 2
        from stage04_kernels.lab import bench

        for _ in printed(bench.bench_cuda() if args.device == "cuda" else bench.bench_cpu(), "part", str):
            pass
        return 0


class Roofline:
    """Least times."""

    help = "bytes and operations of each kernel, and its least time on a chip"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Its flags."""
        parser.add_argument("--chip", choices=("h200", "h100", "a100", "mi300x"), default="h200", help="default h200")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the table."""
        from stage04_kernels.lab.roofline import RATES, table

        print("\n".join(table(RATES[args.chip])))
        return 0


def printed(
    parts: Sequence[Callable[[], Iterator[Found]]], unit: str, words: Callable[[Found], str]
) -> Iterator[Found]:
    """What the parts find, a line each as soon as it is there, and in a terminal below them a line that counts the parts (3 of 14)."""
    above: Callable[[], AbstractContextManager[Any]] = nullcontext
    counted: Any = parts
    try:
        from tqdm import tqdm
    except ImportError:  # torch does not bring it
        pass
    else:
        above, counted = tqdm.external_write_mode, tqdm(parts, unit=unit, leave=False, disable=None)
    for part in counted:
        for found in part():
            with above():
                print(words(found), flush=True)
            yield found


def seed_number(text: str) -> int:
    """A seed that still fits into 64 bits when the checks count up from it."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in [0, 2^63)")
    return int(text)


COMMANDS: dict[str, Any] = {"check": Check, "compile": Compile, "bench": Bench, "roofline": Roofline}
"""Subcommand -> the class that has its `help`, its `add_arguments(parser)` and its `run(args)`."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def make_parser() -> Parser:
    """The subcommands and their flags."""
    parser = Parser(
        prog="python -m stage04_kernels", description="tensor functions: paged attention, KV write, sampler"
    )
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Exits with 2 if the command line is wrong, with 0 once nobody reads what it prints."""
    try:
        try:
            return _run(argv)
        finally:  # also behind the SystemExit of `--help`
            sys.stdout.flush()
    except BrokenPipeError:  # `... | head`; as in stagetrace.terminal, which may not be there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _run(argv: list[str] | None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
