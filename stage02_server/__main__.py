"""`python -m stage02_server serve MODEL`: the HTTP server without stage 1 (vLLM: python -m vllm.entrypoints.openai.api_server)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stage02_server.cli_args import add_serve_args, resolve_serve_args
from stage03_engine.args import FlexibleArgumentParser, cli_env_setup, run_command
from stage03_engine.tracing import open_trace
from stagetrace import trace


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, serve until a signal ends it, and return the exit code."""
    try:
        return run_command(lambda: _serve(argv))
    finally:
        trace.close()


def _serve(argv: Sequence[str] | None) -> int:
    trace.hold("APIServer")
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="python -m stage02_server", description="The OpenAI-compatible server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve")
    add_serve_args(commands.add_parser("serve", help="serve one model over HTTP", description=parser.description))
    serve_args = resolve_serve_args(parser.parse_args(argv))
    vllm_config, _ = serve_args.engine_args.create_engine_config()
    open_trace(vllm_config)
    from stage02_server.api_server import serve  # late: --help and errors need no web framework

    return serve(vllm_config, serve_args.frontend_args)


if __name__ == "__main__":
    sys.exit(main())
