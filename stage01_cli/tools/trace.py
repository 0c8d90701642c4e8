"""`stages trace`: look at recordings, and replay their decisions. vLLM has no counterpart."""

from __future__ import annotations

import argparse

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError
from stagetrace.commands import add_commands, run_chosen
from stagetrace.errors import TraceError

REPLAY = {"replay": ("stage03_engine.replay.replay", "make every step's decisions again, without a model, and compare")}


class TraceSubcommand(CLISubcommand):
    """The commands of `python -m stagetrace`, and `replay`, which needs the engine's scheduler."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """One subcommand per view."""
        add_commands(parser, REPLAY)

    def cmd(self, args: argparse.Namespace) -> int:
        """Run the chosen one."""
        try:
            return run_chosen(args)
        except TraceError as error:
            raise ConfigError(str(error)) from error
