"""`play RUN`: the recording as a page in the browser, event by event."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from stagetrace.commands.common import add_run, open_recording
from stagetrace.errors import TraceError
from stagetrace.private import private
from stagetrace.read.reader import Recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recording, where to begin, and where the page goes."""
    add_run(parser)
    parser.add_argument("--req", metavar="NAME", help="begin with this request alone, where it is scheduled first")
    parser.add_argument("--step", type=int, metavar="N", help="begin at this step of the engine")
    parser.add_argument(
        "--compare", metavar="RUN", help="a second recording, to be played beside it, their steps side by side"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: a temporary file)")
    parser.add_argument("--no-open", action="store_true", help="only write the page and print its link")


def run(args: argparse.Namespace) -> int:
    """Write the page, print its link and open it."""
    from stagetrace.player import page
    from stagetrace.player.places import root_of_source

    recording = open_recording(args.run)
    start = _start(recording, args.req, args.step)
    text = page(recording, open_recording(args.compare) if args.compare else None, start=start, root=root_of_source())
    path = _file(args.out, recording)
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)
    print(path.as_uri(), flush=True)
    if not args.no_open:
        import webbrowser

        if not webbrowser.open(path.as_uri()):
            print("no browser could be started here: open the link yourself")
    return 0


def _file(out: str | None, recording: Recording) -> Path:
    """The file that is asked for, or one of its own that outlives the command: the browser reads it later."""
    if out is None:
        name = recording.directory.resolve().name
        return Path(tempfile.mkdtemp(prefix="stages-play-")) / f"{name}.html"
    path = Path(out).resolve()
    if not path.parent.is_dir():
        raise TraceError(f"{out}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise TraceError(f"{out} is a folder; name a file in it")
    return path


def _start(recording: Recording, req: str | None, step: int | None) -> str:
    """Where to begin, as a link of the page says it. Raises TraceError for what is not in the recording."""
    from urllib.parse import urlencode

    from stagetrace.player.data import short_names

    asked: dict[str, str] = {}
    if step is not None:
        steps = {event.step for event in recording if event.name == "engine.step"}
        if step not in steps:
            numbers = sorted(number for number in steps if number is not None)
            known = f"its steps are {numbers[0]} to {numbers[-1]}" if numbers else "it has none"
            raise TraceError(f"--step {step}: no such step in this recording; {known}")
        asked["step"] = str(step)
    if req is not None:
        names = short_names(dict.fromkeys(event.req for event in recording if event.req is not None))
        if not any(req in pair for pair in names):
            known = ", ".join(short for _, short in names[:8]) or "none"
            raise TraceError(f"--req {req}: no such request in this recording; it has {known}")
        asked["req"] = req
    return urlencode(asked)
