"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagetrace.errors import TraceError
from stagetrace.read.reader import Recording


def add_run(parser: argparse.ArgumentParser, name: str = "run") -> None:
    """The recording."""
    parser.add_argument(name, metavar=name.upper(), help="folder with the recording (*.jsonl)")


def open_recording(directory: str) -> Recording:
    """A recording that has events. Raises OSError if there is none, TraceError if it is empty or not a trace."""
    below = sorted({path.parent.name for path in Path(directory).glob("*/*.jsonl")})
    if below and not any(Path(directory).glob("*.jsonl")):
        raise TraceError(f"{directory} holds several recordings, choose one: {', '.join(below[:8])}")
    recording = Recording(directory)
    if next(iter(recording), None) is None:
        raise TraceError(
            f"no events in {directory}: its files are empty or not a trace; record one with serve --trace {directory}"
        )
    return recording
