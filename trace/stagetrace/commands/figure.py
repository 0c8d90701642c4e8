"""`figure RUN KIND --out FILE`: draw a recording; without --out, or with --table, the same as text."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from stagetrace import Recording, tell
from stagetrace.commands.common import add_run
from stagetrace.errors import TraceError
from stagetrace.read.story import one_engine

KINDS = ["request_timeline", "process_lanes", "block_map", "token_budget", "latency_breakdown"]
FORMATS = [".png", ".svg", ".pdf"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to draw, and where to write it."""
    add_run(parser)
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument(
        "--out", metavar="FILE", help="write the picture to FILE.png, FILE.svg or FILE.pdf (needs matplotlib)"
    )
    parser.add_argument("--table", action="store_true", help="print the same as text (the default without --out)")
    parser.add_argument(
        "--req", metavar="ID", help="process_lanes: one request only, by its id or the client's name for it"
    )
    parser.add_argument(
        "--x", choices=["step", "time"], help="request_timeline: what runs from left to right (default: step)"
    )
    parser.add_argument(
        "--engine",
        metavar="N",
        type=int,
        help="of several engines this one (default: the first, or the one that has --req)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw or print. Raises TraceError for a file name of another format, or an argument that this figure does not have."""
    from stagetrace import figures

    draw, table = getattr(figures, args.kind), getattr(figures, f"{args.kind}_table")
    if args.out is not None and Path(args.out).suffix.lower() not in FORMATS:
        raise TraceError(f"--out {args.out}: the name must end in {', '.join(FORMATS)}")
    given = {name: value for name, value in (("req", args.req), ("x", args.x)) if value is not None}
    for name in given.keys() - inspect.signature(draw).parameters.keys():
        raise TraceError(f"--{name} says nothing about {args.kind}")
    story = tell(Recording(args.run))
    if len(story.engines) > 1 and args.engine is None and args.kind not in ("latency_breakdown", "process_lanes"):
        names = sorted({story.processes[pid] for pid in story.engines})
        print(f"the figure shows the first of {', '.join(names)}; --engine N shows another", file=sys.stderr)
    if args.engine is not None:
        story = one_engine(story, args.engine)
    if args.out is not None:
        draw(story, **given).savefig(args.out)
    if args.out is None or args.table:
        print(table(story, **{name: value for name, value in given.items() if name == "req"}))
    return 0
