"""`stages lab`: the page on a local server, or as a folder. vLLM has no counterpart."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import secrets
import socket
from pathlib import Path

from stage01_cli.tools.lab.worker import sandbox_problem
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import ConfigError


class LabSubcommand(CLISubcommand):
    """Serve the laboratory, or write it to a folder."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Where to serve it, whose scheduler, or where to write it."""
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
        parser.add_argument("--port", type=int, default=0, help="port; 0 = any free one (default)")
        parser.add_argument(
            "--scheduler-cls",
            metavar="FILE.py:CLASS",
            help="a scheduler of your own, beside the reference; read anew for each run",
        )
        parser.add_argument(
            "--static", metavar="DIR", help="write a folder that runs in any browser, without a server of ours, and end"
        )
        parser.add_argument(
            "--pyodide", metavar="DIR",
            help="with --static: folder with Pyodide's npm package and a wheel of msgspec for it, instead of fetching both",
        )  # fmt: skip

    def cmd(self, args: argparse.Namespace) -> int:
        """Serve until Ctrl-C, or write the folder."""
        if args.static is not None:
            from stage01_cli.tools.lab.static_site import write_site

            if args.scheduler_cls is not None:
                raise ConfigError(
                    "--scheduler-cls is for the server: the static page has a text box for a class of your own"
                )
            for line in write_site(Path(args.static), None if args.pyodide is None else Path(args.pyodide)):
                print(line, flush=True)
            return 0
        if args.pyodide is not None:
            raise ConfigError("--pyodide belongs to --static")
        if args.scheduler_cls is not None:
            check_own(args.scheduler_cls)
        return asyncio.run(_serve(args.host, args.port, args.scheduler_cls))


def check_own(scheduler_cls: str) -> None:
    """Raises ConfigError if the class cannot be loaded now. Its code runs in this process once; simulations run in another."""
    from stage01_cli.tools.lab.own_scheduler import OwnScheduler

    own = OwnScheduler(scheduler_cls)
    try:
        own.load()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--scheduler-cls {scheduler_cls}: {own.describe(error)}") from error


async def _serve(host: str, port: int, scheduler_cls: str | None) -> int:
    import uvicorn

    from stage01_cli.tools.lab.app import make_app

    listener = listen(host, port)
    link, key = link_and_key(host, listener, scheduler_cls)
    app = make_app(host, scheduler_cls, key=key)
    config = uvicorn.Config(app, server_header=False, ws="none", log_level="warning", timeout_graceful_shutdown=1)
    print(f"The laboratory is on {link} (Ctrl-C ends it)", flush=True)
    with listener:
        await uvicorn.Server(config).serve(sockets=[listener])
    return 0


def link_and_key(host: str, listener: socket.socket, scheduler_cls: str | None) -> tuple[str, str | None]:
    """The page's address, and the key that stands in it. Without a key the page has no editor: where other machines can ask, where code cannot be shut in, and where a file is the editor."""
    address, port = listener.getsockname()[:2]
    link = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    if scheduler_cls is not None or not ipaddress.ip_address(address).is_loopback or sandbox_problem() is not None:
        return link, None
    key = secrets.token_urlsafe()
    return f"{link}?key={key}", key


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError if the address or the port cannot be had."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # a client that comes before the server is ready waits a moment, and is not refused
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; --port 0 takes any free port"
        ) from error
    return listener
