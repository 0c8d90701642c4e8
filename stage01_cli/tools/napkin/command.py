"""`stages napkin`: the arithmetic in the terminal, or its page as a file. vLLM has no counterpart."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError

NUMBERS: dict[str, tuple[float, float, float, str]] = {
    "prompt": (1, 131_072, 512, "tokens of a prompt"),
    "answer": (1, 131_072, 256, "tokens of an answer"),
    "tpot-ms": (1, 1000, 50, "milliseconds for a further token, at most"),
    "weight-bytes": (0.5, 4, 2, "bytes of a weight: 4, 2, 1 or 0.5"),
    "kv-bytes": (1, 4, 2, "bytes of a number in the KV cache: 4, 2 or 1"),
    "price": (0.01, 1000, 3, "of an hour of the chip, in any currency; the default is an example"),
    "reach": (1, 100, 100, "percent of the data sheet that a program reaches"),
}
"""Flag -> least, most, default, what it is. The page has a slider for each."""


class NapkinSubcommand(CLISubcommand):
    """Print the napkin, or write its page."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Model, chip, the numbers, and where to write the page."""
        parser.add_argument("--model", default="Llama-2-7B", help="a known model (default: Llama-2-7B)")
        parser.add_argument("--chip", default="H100", help="a known chip (default: H100)")
        for flag, (_, _, default, says) in NUMBERS.items():
            kind = int if flag in ("prompt", "answer") else float
            parser.add_argument(f"--{flag}", type=kind, default=default, help=f"{says} (default: {default:g})")
        parser.add_argument(
            "--html", metavar="FILE", help="write the page with sliders, which needs no server, and end"
        )

    def cmd(self, args: argparse.Namespace) -> int:
        """Print or write."""
        if args.html is not None:
            from stage01_cli.tools.napkin.page import build_page

            try:
                Path(args.html).write_text(build_page(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write {args.html}: {error.strerror or error}") from error
            print(f"wrote {args.html}: open it in a browser")
            return 0
        for line in lines(args.model, args.chip, {flag: getattr(args, flag.replace("-", "_")) for flag in NUMBERS}):
            print(line)
        return 0


def lines(model: str, chip: str, numbers: dict[str, float]) -> Iterator[str]:
    """What is printed. Raises ConfigError for what is unknown or out of bounds."""
    from stage01_cli.tools.napkin.arithmetic import Load, napkin
    from stage01_cli.tools.napkin.facts import CHIPS, MODELS, WALLS

    for flag, value in numbers.items():
        least, most, *_ = NUMBERS[flag]
        if not least <= value <= most:
            raise ConfigError(f"--{flag} must be {least:g} to {most:,.0f}, not {value:g}")
    load = Load(
        int(numbers["prompt"]), int(numbers["answer"]), numbers["tpot-ms"] / 1000, numbers["weight-bytes"],
        numbers["kv-bytes"], numbers["price"], numbers["reach"] / 100,
    )  # fmt: skip
    try:
        found = napkin(_known("model", model, MODELS), _known("chip", chip, CHIPS), load)
    except ValueError as error:
        raise ConfigError(f"{error}: lower --prompt or --answer") from error
    yield f"{'weights':28} {found.weight_bytes / 1e9:.2f} GB"
    yield f"{'KV cache of a token':28} {found.kv_bytes_per_token / 1e3:.1f} kB"
    yield f"{'KV cache of a user':28} {found.kv_bytes_per_user / 1e9:.3f} GB"
    yield f"{'prefill of a prompt':28} {found.prefill * 1e3:.2f} ms"
    yield f"{'decode step of one user':28} {found.step_of_one * 1e3:.2f} ms"
    yield f"{'compute-bound from':28} {'no batch size' if math.isinf(found.crossing) else f'a batch of {found.crossing:.0f}'}"
    for wall in ("memory", "bandwidth", "arithmetic"):
        yield f"{f'users that {wall} allows':28} {getattr(found, f'{wall}_wall'):,}"
    yield f"{'users':28} {found.users:,}: {found.wall} is the wall, {WALLS[found.wall][not found.users]}"
    if found.users:
        yield f"{'TPOT':28} {found.tpot * 1e3:.2f} ms"
        yield f"{'tokens a second':28} {found.tokens_per_second:,.0f}"
        yield f"{'a million tokens':28} {found.cost:.3f}"


def _known(what: str, name: str, table: dict[str, Any]) -> Any:
    by_name = {each.lower(): value for each, value in table.items()}
    if name.lower() not in by_name:
        raise ConfigError(f"unknown --{what} {name}; known are {', '.join(table)}")
    return by_name[name.lower()]
