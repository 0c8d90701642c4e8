"""The command line of stage 4: check, compile, bench, roofline. vLLM has no such commands; its checks live in its tests."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from stagetrace import trace

if TYPE_CHECKING:
    from stage04_kernels.lab.check_row import Row


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,compile,bench,roofline}")
    check = commands.add_parser("check", help="compare every fast path with its slow twin and print a table")
    check.add_argument("--seed", type=seed_number, default=0, help="seed of the random cases (default 0)")
    check.add_argument("--only", action="append", choices=("attention", "layers", "sampling", "triton"),
                       help="a part of the table; may be repeated")  # fmt: skip
    check.add_argument("--trace", metavar="DIR", help="folder to write a trace file to")
    check.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu interprets the Triton kernels (default)"
    )
    build = commands.add_parser(
        "compile", help="compile the Triton kernels for chips that need not be there, and print what they take"
    )
    build.add_argument("--chip", action="append", choices=CHIP_NAMES, help="may be repeated; all if not given")
    bench = commands.add_parser("bench", help="measure kernels against what else there is; on a GPU check them first")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default cpu)")
    roofline = commands.add_parser("roofline", help="bytes and operations of each kernel, and its least time on a chip")
    roofline.add_argument("--chip", choices=("h200", "h100", "a100", "mi300x"), default="h200", help="default h200")
    return parser


HEADER = ("what", "checked against", "cases", "dtype", "max abs error", "tolerance", "ok")
LINE = "{:<60} {:<28} {:>5}  {:<9} {:>13}  {:<20} {}"


def render(row: Row) -> str:
    """One line of the table."""
    ok = "ok" if row.ok else "WRONG"
    return LINE.format(row.what, row.against, row.cases, row.dtype, f"{row.max_error:.1e}", str(row.tolerance), ok)


CHIP_NAMES = ("sm_80", "sm_90", "gfx942")
RESOURCES = "{:8} {:50} {:>9} {:>7} {:>9} {:>10} {:>10}  {}"


def run_compile(chips: list[str]) -> int:
    """Print what every kernel takes of every chip. Returns 1 if one breaks its budget; gfx942 never does."""
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: an interpreted kernel cannot be compiled
    from stage04_kernels.lab.compile import run_compile

    print(RESOURCES.format("chip", "kernel", "registers", "spills", "shared", "wide loads", "matrix ops", "budget"))
    broken = 0
    for found in run_compile(chips):
        best_effort = found.chip == "gfx942"
        broken += bool(found.problems) and not best_effort
        numbers = (found.registers, found.spilled_bytes, found.shared_bytes, found.wide_loads, found.matrix_ops)
        print(RESOURCES.format(found.chip, found.variant, *numbers, "; ".join(found.problems) or "ok"), flush=True)
    print(f"{broken} over budget")
    return 1 if broken else 0


def run_bench(device: str) -> int:
    """Print one line per measurement. On a GPU the checks come first, and nothing is measured that is wrong."""
    import torch

    from stage04_kernels.lab import bench

    if device == "cuda":
        if not torch.cuda.is_available():
            print("python -m stage04_kernels: --device cuda: torch finds no usable GPU", file=sys.stderr)
            return 2
        if run_check(0, "cuda"):
            return 1
    for measured in bench.bench_cuda() if device == "cuda" else bench.bench_cpu():
        print(measured, flush=True)
    return 0


def run_roofline(chip: str) -> int:
    """Print the page."""
    from stage04_kernels.lab.roofline import RATES, table

    print("\n".join(table(RATES[chip])))
    return 0


def run_check(seed: int, device: str = "cpu", parts: list[str] | None = None) -> int:
    """Print the table while it is computed. Returns the exit code: 0 if every row is ok, else 1."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from stage04_kernels.lab.check import run_checks

    torch.set_num_threads(1)  # the cases are small: a second thread would only wait, and disturb what else runs here
    print(LINE.format(*HEADER))
    total = wrong = 0
    for row in run_checks(seed, parts):
        print(render(row), flush=True)
        total += 1
        wrong += not row.ok
    print(f"{total} rows, {wrong} wrong")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code. Exits with 2 when the command line is wrong."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command == "compile":
        return run_compile(args.chip or list(CHIP_NAMES))
    if args.command == "bench":
        return run_bench(args.device)
    if args.command == "roofline":
        return run_roofline(args.chip)
    if args.trace is not None:
        trace.hold("Kernels")
        try:
            trace.open(args.trace, seed=args.seed)
        except OSError as error:
            trace.drop()
            parser.error(f"cannot write traces to {args.trace!r}: {error.strerror or error}")
    try:
        return run_check(args.seed, args.device, args.only)
    finally:
        trace.close()


if __name__ == "__main__":
    sys.exit(main())
