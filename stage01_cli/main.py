"""The program `stages`: its subcommands and its parser (vllm/entrypoints/cli/main.py). `run_program` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine import __version__
from stage03_engine.args.command import CLISubcommand, run_program
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.mixins import load
from stage03_engine.plugins import keys

COMMANDS = {
    "serve": ("stage02_server.serve:ServeSubcommand", "serve a model over an OpenAI-compatible HTTP API"),
    **{name: (part.name, part.help) for name, part in keys("command").items()},
}
"""Subcommand -> (its class, its line in `stages --help`). Only the chosen one is imported."""


TRACED = ("serve", "run-batch")
"""Commands whose own process becomes the API server: their trace begins here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stages` with `argv` (default: the process's own arguments) and return the exit code."""
    return run_program("stages", COMMANDS, make_parser, argv, TRACED)


def make_parser(chosen: str | None) -> FlexibleArgumentParser:
    """The parser of `stages`. Only the chosen subcommand is imported and adds its flags; the others are just names."""
    parser = FlexibleArgumentParser(
        prog="stages", description="vLLM in stages: a small inference server, part by part."
    )
    parser.add_argument(
        "-v", "--version", action="version", version=f"stages {__version__}", help="print the version and exit"
    )
    subparsers = parser.add_subparsers(dest="subparser", metavar="COMMAND")
    for name, (where, help) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help, description=help)
        if name == chosen:
            command: CLISubcommand = load(where)()
            command.add_arguments(subparser)
            subparser.set_defaults(dispatch_function=command.cmd)
    return parser
