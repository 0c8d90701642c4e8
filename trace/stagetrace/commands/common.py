"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_run(parser: argparse.ArgumentParser, name: str = "run") -> None:
    """The recording."""
    parser.add_argument(name, metavar=name.upper(), help="folder with the recording (*.jsonl)")
