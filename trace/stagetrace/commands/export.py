"""`export RUN`: the recording in the formats of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from stagetrace.commands.common import add_run
from stagetrace.errors import TraceError
from stagetrace.private import private
from stagetrace.read.reader import Recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per format; at least one."""
    add_run(parser)
    parser.add_argument(
        "--perfetto", metavar="FILE", help="Chrome trace events (JSON): open the file in ui.perfetto.dev"
    )
    parser.add_argument(
        "--otlp", metavar="URL|FILE",
        help="OpenTelemetry spans: to a collector (http://localhost:4318), or to a file, one OTLP JSON request per line",
    )  # fmt: skip
    parser.add_argument(
        "--csv", metavar="FOLDER|FILE",
        help="tables: requests.csv, steps.csv and events.csv in a folder that is created if missing, or one of them under that name",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="the player: one page that needs no network")


def run(args: argparse.Namespace) -> int:
    """Write what was asked for. Existing files are replaced; folders of files must exist."""
    recording = Recording(args.run)
    if not any((args.perfetto, args.otlp, args.csv, args.html)):
        raise TraceError("nothing to export to: give --perfetto FILE, --otlp URL or FILE, --csv FOLDER or --html FILE")
    for path in filter(None, (args.perfetto, args.html)):
        _check_file(path)
    if args.perfetto:
        from stagetrace.export.perfetto import write_perfetto

        write_perfetto(recording, args.perfetto)
    if args.csv:
        from stagetrace.read.tables import write_tables

        write_tables(recording, args.csv)
    if args.otlp:
        _otlp(recording, args.otlp)
    if args.html:
        from stagetrace.player import page

        with open(args.html, "w", encoding="utf-8", opener=private) as file:
            file.write(page(recording))
    return 0


def _otlp(recording: Recording, target: str) -> None:
    try:
        from stagetrace.export import otlp
    except ImportError as error:
        raise TraceError(
            f"OTLP needs opentelemetry ({error}): pip install --editable '.[trace]' in the project's folder adds it"
        ) from error
    if "://" in target:
        otlp.send(recording, target)
    else:
        _check_file(target)
        otlp.write_file(recording, target)


def _check_file(path: str) -> None:
    if not Path(path).parent.is_dir():
        raise TraceError(f"{path}: the folder {Path(path).parent} does not exist; create it first")
    if Path(path).is_dir():
        raise TraceError(f"{path} is a folder; name a file in it")
