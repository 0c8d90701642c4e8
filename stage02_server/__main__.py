"""`python -m stage02_server serve MODEL`: the HTTP server without stage 1 (vLLM: python -m vllm.entrypoints.openai.api_server)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stage03_engine.args.command import run_program
from stage03_engine.args.parser import FlexibleArgumentParser

PROGRAM = "python -m stage02_server"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, serve until a signal ends it, and return the exit code."""
    return run_program(PROGRAM, ["serve"], make_parser, argv, traced=["serve"])


def make_parser(chosen: str | None) -> FlexibleArgumentParser:
    """A parser with one subcommand, the same as that of `stages`."""
    parser = FlexibleArgumentParser(prog=PROGRAM, description="The OpenAI-compatible server.")
    commands = parser.add_subparsers(dest="subparser", metavar="serve")
    serve = commands.add_parser("serve", help="serve one model over HTTP", description=parser.description)
    if chosen == "serve":
        from stage02_server.serve import ServeSubcommand  # in here what an import refuses is one line

        command = ServeSubcommand()
        command.add_arguments(serve)
        serve.set_defaults(dispatch_function=command.cmd)
    return parser


if __name__ == "__main__":
    sys.exit(main())
