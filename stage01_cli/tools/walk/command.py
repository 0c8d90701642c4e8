"""`stages walk`: the path of one real request, or of a start, through this code. vLLM has no counterpart."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError
from stagetrace.errors import TraceError
from stagetrace.read.selection import phases_of
from stagetrace.read.terminal import add_colour, ascii_if_needed
from stagetrace.terminal import is_terminal, wants_colour, width_of_output
from stagetrace.text import bounded

if TYPE_CHECKING:
    from stage01_cli.tools.walk.path import Path
    from stage01_cli.tools.walk.run import Wish

MOST_TOKENS = 64
COLUMNS = "ms to the first entry, calls (↻: was running already), function, its line, trace events, shapes and counts"
PHASES_OF_START, PHASES_OF_REQUEST = frozenset(range(1, 6)), frozenset(range(6, 10))


class WalkSubcommand(CLISubcommand):
    """Run it under a monitor in both processes, and tell which functions it entered."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """What to run, and what to show of it."""
        parser.add_argument("prompt", nargs="?", help="the request's text; with --start there is none")
        parser.add_argument("--start", action="store_true", help="the start instead: from `stages serve` to /health")
        parser.add_argument("--model", default="gpt2-tiny", help="a model as for serve (default: %(default)s)")
        parser.add_argument(
            "--max-tokens", default="8", metavar="N", help=f"of the answer, up to {MOST_TOKENS} (default: %(default)s)"
        )
        parser.add_argument("--phase", metavar="N", help="only these phases: 8, 7-9, or 6,9")
        parser.add_argument("--all", action="store_true", help="every function, with arguments and result")
        parser.add_argument(
            "--features", action="store_true", help="also each function inside `features/`, not counted"
        )
        parser.add_argument("--html", metavar="FILE", help="write a page to step through, with the source beside it")
        parser.add_argument("--port", default="0", help="the server's port (default: any that is free)")
        parser.add_argument(
            "--attention-backend", default="torch", help="as for serve (default: %(default)s, which is all Python)"
        )
        parser.add_argument("--linear-backend", default="torch", help="as for serve (default: %(default)s)")
        add_colour(parser)

    def cmd(self, args: argparse.Namespace) -> int:
        """Run it. Raises StagesError."""
        wish, phases = _wish(args), _phases(args)
        page = None if args.html is None else _writable(args.html)
        from stage01_cli.tools.walk.path import path_of
        from stage01_cli.tools.walk.run import REQUEST, START, make

        what = "the start" if wish.prompt is None else "the request"
        print(f"watching {what} of {wish.model} in both processes ...", file=sys.stderr)
        path = path_of(make(wish), START if wish.prompt is None else REQUEST)
        _print(path, wish, phases, args)
        if page is not None:
            from stage01_cli.tools.walk.page import page_of

            text = page_of(path, _title(path, wish), phases)
            page.write_text(text, encoding="utf-8")
            print(f"\n{page}: {len(text.encode()) // 1000} kB, opens in a browser", file=sys.stderr)
        return 0


def _wish(args: argparse.Namespace) -> Wish:
    from stage01_cli.tools.walk.run import Wish

    if args.start and args.prompt is not None:
        raise ConfigError("--start has no prompt: it ends when the server is ready")
    if not args.start and args.prompt is None:
        raise ConfigError('give a prompt, as in: stages walk "To be, or"; or --start')
    flags = ("--attention-backend", args.attention_backend, "--linear-backend", args.linear_backend)
    tokens, port = _number(args, "max_tokens", 1, MOST_TOKENS), _number(args, "port", 0, 65535)
    return Wish(args.model, args.prompt, tokens, port, flags)


def _number(args: argparse.Namespace, name: str, least: int, most: int) -> int:
    flag = f"--{name.replace('_', '-')}"
    try:
        value = parse_int(getattr(args, name))
    except ValueError as error:
        raise ConfigError(f"argument {flag}: {error}") from None
    if not least <= value <= most:
        raise ConfigError(f"{flag} must be between {least} and {most}, not {value}")
    return value


def _phases(args: argparse.Namespace) -> frozenset[int]:
    there = PHASES_OF_START if args.start else PHASES_OF_REQUEST
    try:
        wanted = phases_of(args.phase)
    except TraceError as error:
        raise ConfigError(str(error)) from error
    if args.phase is not None and not wanted & there:
        which = "a start has the phases 1-5" if args.start else "a request has the phases 6-9; --start shows 1-5"
        raise ConfigError(f"--phase {args.phase}: {which}")
    return wanted & there


def _writable(name: str) -> FilePath:
    """Found out now, not after the run."""
    file = FilePath(name)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"cannot write {name}: give the name of a file in a folder that is there")
    return file


def _title(path: Path, wish: Wish) -> str:
    """One sentence about the run."""
    rows = path.rows
    files, processes = len({row.function.file for row in rows}), len({row.process for row in rows})
    size = f"{len(rows)} functions of {files} files, {processes} processes, {path.took / 1e6:.0f} ms under the monitor"
    if wish.prompt is None:
        return f"The start of {wish.model}: {size}"
    return f'"{bounded(wish.prompt)}" through {wish.model}: {size}'


def _print(path: Path, wish: Wish, phases: frozenset[int], args: argparse.Namespace) -> None:
    from stage01_cli.tools.walk.text import lines_of

    colour, columns = wants_colour(args.color), width_of_output() if is_terminal(sys.stdout) else None
    print(ascii_if_needed(_title(path, wish)))
    print(ascii_if_needed(COLUMNS))
    for line in lines_of(path, phases, args.all, colour, columns, args.features):
        print(ascii_if_needed(line))
