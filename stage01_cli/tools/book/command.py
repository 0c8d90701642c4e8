"""`stages book`: everything there is to read, as one folder. vLLM has no counterpart."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError

DEFAULT = "build/book"


class BookSubcommand(CLISubcommand):
    """Write the book, and open it."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Where to write it, and what to do then."""
        parser.add_argument("--out", metavar="DIR", default=DEFAULT, help=f"the folder to write (default: {DEFAULT})")
        parser.add_argument(
            "--open", action="store_true", help="open it in the browser, from a small server on this machine"
        )
        parser.add_argument(
            "--pyodide", metavar="DIR", nargs="?", const="",
            help="put the laboratory and the exercises that a browser can judge into the book: DIR holds Pyodide's npm package and wheels for it; "
            "without DIR they are fetched",
        )  # fmt: skip

    def cmd(self, args: argparse.Namespace) -> int:
        """Build; with --open serve it until Ctrl-C."""
        from stage01_cli.tools.book.build import build_book

        out = Path(args.out)
        with tempfile.TemporaryDirectory(prefix="stages-book-") as scratch:
            for line in build_book(out, pyodide_folder(args.pyodide, Path(scratch))):
                print(line, flush=True)
        if args.open:
            serve(out)
        return 0


def pyodide_folder(given: str | None, scratch: Path) -> Path | None:
    """Where Pyodide and its wheels are, or None without --pyodide. Raises ConfigError if they are to be fetched and cannot be."""
    if given != "":
        return None if given is None else Path(given)
    from stage01_cli.tools.book.exercise_page import requirements
    from stage01_cli.tools.lab.static_site import fetch

    fetch(scratch, requirements())
    return scratch


def serve(folder: Path) -> None:
    """Serve a folder on a free port of this machine, open it in the browser, and go on until Ctrl-C."""
    import webbrowser
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """A page of the book asks for many files."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    except OSError as error:
        raise ConfigError(f"cannot listen on 127.0.0.1: {error.strerror}") from error
    with server:
        link = f"http://localhost:{server.server_address[1]}/"
        print(f"The book is on {link} (Ctrl-C ends it)", flush=True)
        webbrowser.open(link)
        server.serve_forever()
