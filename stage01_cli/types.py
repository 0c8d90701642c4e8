"""What a subcommand is (vllm/entrypoints/cli/types.py)."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod


class CLISubcommand(ABC):
    """One subcommand of `stages`. It imports what it needs in `cmd`, so that its `--help` stays quick."""

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own flags."""

    @abstractmethod
    def cmd(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code. Raises StagesError for what the user can mend."""
