"""The commands over recordings, one module each: `python -m stagetrace view RUN`, the same as `stages trace view RUN`.

A command's module has `add_arguments(parser)` and `run(args) -> exit code`; it imports what is heavy in `run`.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from stagetrace.errors import TraceError

COMMANDS: dict[str, tuple[str, str]] = {
    "view": ("stagetrace.commands.view", "all events in columns, one per process; --follow for a live run"),
    "show": (
        "stagetrace.commands.show",
        "the requests; with --req the story of one, from the HTTP byte to the last chunk",
    ),
    "play": ("stagetrace.commands.play", "play a recording in the browser, event by event"),
    "step": ("stagetrace.commands.step", "walk through a recording, forward and back"),
    "stats": (
        "stagetrace.commands.stats",
        "where the time went, by phase and by request: TTFT and TPOT split by cause",
    ),
    "why": ("stagetrace.commands.why", "why a request waited, was preempted, or got what it got in a step"),
    "diff": ("stagetrace.commands.diff", "the first difference between two recordings"),
    "check": ("stagetrace.commands.check", "whether the recording is consistent, and what is missing"),
    "export": ("stagetrace.commands.export", "Perfetto, OpenTelemetry, CSV, or one HTML page"),
    "figure": ("stagetrace.commands.figure", "draw a recording, or print the same as a table"),
}
"""Command -> (module, what it does in a few words)."""


def add_commands(parser: argparse.ArgumentParser, more: dict[str, tuple[str, str]] | None = None) -> None:
    """Add the commands, and `more` of the caller's, to a parser."""

    def print_help(args: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(run_trace_command=print_help)  # each of the commands below sets its own
    subparsers = parser.add_subparsers(dest="trace_command", metavar="COMMAND")
    for name, (module, text) in (COMMANDS | (more or {})).items():
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command = import_module(module)
        command.add_arguments(subparser)
        subparser.set_defaults(run_trace_command=command.run)


def run_chosen(args: argparse.Namespace) -> int:
    """Run the command that was chosen. Raises TraceError for what the user can fix."""
    try:
        code: int = args.run_trace_command(args)
        return code
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TraceError(str(error)) from error
