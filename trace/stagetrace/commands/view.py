"""`view RUN`: all events, a line each, a column per process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from stagetrace.commands.common import add_run, open_recording
from stagetrace.errors import TraceError
from stagetrace.event import Event
from stagetrace.read.columns import Columns
from stagetrace.read.folding import Folding
from stagetrace.read.follow import Follower
from stagetrace.read.selection import Selection, add_selection, selection_of
from stagetrace.read.terminal import add_colour, ascii_if_needed
from stagetrace.terminal import is_terminal, wants_colour, width_of_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, which events, and the layout."""
    add_run(parser)
    add_selection(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N events")
    parser.add_argument(
        "--unfold",
        action="store_true",
        help="two lines for each exchange of tensors between workers; otherwise those in a row are one, with their number",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="wait for more events, until all processes of the run have ended (or Ctrl-C)",
    )
    parser.add_argument(
        "--width",
        type=int,
        metavar="COLUMNS",
        help="width of the output (default: the terminal's; in a pipe nothing is cut)",
    )
    add_colour(parser)


def run(args: argparse.Namespace) -> int:
    """Print the events."""
    selection = selection_of(args)
    if args.limit is not None and args.limit < 1:
        raise TraceError(f"--limit {args.limit}: expected a number above 0")
    whole = args.width is None and not is_terminal(sys.stdout)
    columns = Columns(args.width or width_of_output(), wants_colour(args.color), whole=whole)
    if args.follow:
        if not any(Path(args.run).glob("*.jsonl")):
            print(f"waiting for a trace in {args.run} ...", file=sys.stderr)
        _print(Follower(args.run), columns, selection, args)
        return 0
    recording = open_recording(args.run)
    columns.start_ns = recording.start_ns()
    for pid, name in recording.processes().items():
        columns.add_process(pid, name)
    if not _print(recording, columns, selection, args):
        print("no event of this recording is selected", file=sys.stderr)
    if recording.torn:
        print(f"{recording.torn} file(s) end within a line: their processes were cut off", file=sys.stderr)
    return 0


def _print(events: Iterable[Event], columns: Columns, selection: Selection, args: argparse.Namespace) -> int:
    """Return how many lines with events were printed."""
    number, folding = 0, None if args.unfold else Folding()
    known = columns.num_processes
    for line in columns.heading() if known else []:
        print(ascii_if_needed(line))
    for event in events:
        if isinstance(events, Follower):
            columns.start_ns = events.start_ns
        columns.note(event)
        if columns.num_processes > known:  # a process appeared
            known = columns.num_processes
            print("\n".join(map(ascii_if_needed, columns.heading())))
        for each in [event] if folding is None else folding.feed(event):
            if selection.takes(each):
                print(ascii_if_needed(columns.line(each)), flush=isinstance(events, Follower))
                number += 1
                if number == args.limit:
                    return number
    for each in () if folding is None else folding.finish():
        if selection.takes(each):
            print(ascii_if_needed(columns.line(each)))
            number += 1
    return number
