"""The program `stages`: environment, parser, dispatch (vllm/entrypoints/cli/main.py)."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from stage03_engine.args import FlexibleArgumentParser, cli_env_setup, did_you_mean, run_command
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load_feature
from stagetrace import trace
from stagetrace.redact import redact_argv, redact_values


class CLISubcommand(ABC):
    """One subcommand of `stages`. It imports what it needs in `cmd`, so that its `--help` stays quick."""

    @abstractmethod
    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Add the command's own flags."""

    @abstractmethod
    def cmd(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code. Raises StagesError for what the user can fix."""


COMMANDS = {
    "serve": ("stage01_cli.serve:ServeSubcommand", "serve a model over an OpenAI-compatible HTTP API"),
    "chat": ("stage01_cli.tools.openai_client:ChatCommand", "chat with a running server"),
    "complete": ("stage01_cli.tools.openai_client:CompleteCommand", "let a running server complete a text"),
    "bench": ("stage01_cli.bench.command:BenchSubcommand", "measure a server, the engine, or its start"),
    "run-batch": ("stage01_cli.tools.run_batch:RunBatchSubcommand", "answer a file of requests (OpenAI's batches)"),
    "trace": ("stage01_cli.tools.trace:TraceSubcommand", "look at recordings made with --trace"),
    "collect-env": ("stage01_cli.tools.collect_env:CollectEnvSubcommand", "describe this machine, for a report"),
}
"""Subcommand -> (its class, its line in `stages --help`). Only the chosen one is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `stages` with `argv` (default: the process's own arguments) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_command(lambda: _main(words))
    finally:
        trace.close()


def _main(words: list[str]) -> int:
    chosen = words[0] if words and not words[0].startswith("-") else None
    if chosen in ("serve", "run-batch"):  # commands whose work is traced: their process becomes the API server
        trace.hold("APIServer")
    if trace.on:
        trace.emit("cli.main", argv=redact_argv(words))
    env = cli_env_setup()
    if trace.on:
        trace.emit("cli.env_setup", set=redact_values(env))
    if chosen is not None and chosen not in COMMANDS:
        raise ConfigError(f"no command {chosen!r}{did_you_mean(chosen, COMMANDS)}; see stages --help")
    parser = make_parser(chosen)
    # Without a command only the first flag counts: argparse would take the value of an unknown one for the command.
    args = parser.parse_args(words if chosen is not None else words[:1])
    if trace.on:
        trace.emit("cli.parsed", subparser=str(args.subparser))
    if args.subparser is None:
        parser.print_help(sys.stderr)
        return ConfigError.exit_code
    if trace.on:
        trace.emit("cli.dispatch", function=args.dispatch_function.__qualname__)
    return args.dispatch_function(args)


def make_parser(chosen: str | None) -> FlexibleArgumentParser:
    """The parser of `stages`. Only the chosen subcommand is imported and adds its flags; the others are just names."""
    parser = FlexibleArgumentParser(
        prog="stages", description="vLLM in stages: a small inference server, part by part."
    )
    parser.add_argument("-v", "--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="subparser", metavar="COMMAND")
    for name, (where, help) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help, description=help)
        if name == chosen:
            command: CLISubcommand = load_feature(where, f"the command {name}")()
            command.add_arguments(subparser)
            subparser.set_defaults(dispatch_function=command.cmd)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: that reads the installed package's files."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"stages {version('vllm-in-stages')}")
        parser.exit()
