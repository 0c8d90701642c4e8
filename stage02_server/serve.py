"""The command `serve`: choose the model and the form of the server, then start it (vllm/entrypoints/cli/serve.py).

`stages serve` and `python -m stage02_server serve` are this one command. It is in this stage because stage 2 must run without stage 1.
"""

from __future__ import annotations

import argparse

from stage02_server.cli_args import add_serve_args, resolve_serve_args
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.plugins import check_features, loaded, wanted
from stage03_engine.tracing import open_trace
from stagetrace import trace


class ServeSubcommand(CLISubcommand):
    """Resolve the arguments, walk the decision tree, start the server."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `serve`."""
        parser.add_argument(
            "--dry-run", action="store_true", help="print all settings, their origin, and a start's memory; then exit"
        )
        add_serve_args(parser)

    def cmd(self, args: argparse.Namespace) -> int:
        """Serve until a signal ends it. Raises StagesError if the configuration is impossible."""
        check_features("stage02_server")
        serve_args = resolve_serve_args(args)
        settings, frontend_args = serve_args.settings, serve_args.frontend_args
        if trace.on:
            trace.emit("serve.model_tag", model=settings["model"].value, source=settings["model"].origin)
        count = getattr(frontend_args, "api_server_count", None)
        branch = decide(getattr(frontend_args, "headless", False), 1 if count is None else count)
        vllm_config, settings = serve_args.engine_args.create_engine_config()
        for check in loaded("serve", "check"):
            check(vllm_config)
        if branch == "run_headless" and not args.dry_run:  # its trace begins later: the head knows the run's id
            return wanted("serve", branch, "headless")(vllm_config)
        open_trace(vllm_config)
        if args.dry_run:
            table = wanted("serve", "dry_run", "--dry-run")
            print(table(vllm_config, settings))
            return 0
        if branch == "run_multi_api_server":
            return wanted("serve", branch, "api_server_count above 1")(vllm_config, frontend_args)
        from stage02_server.api_server import serve  # late: `serve --help` needs no web framework

        return serve(vllm_config, frontend_args)


def decide(headless: bool, api_server_count: int) -> str:
    """The decision tree of `serve`: this process becomes the API server, starts several, or works for one on another machine."""
    if headless or api_server_count < 1:
        branch = "run_headless"
    elif api_server_count > 1:
        branch = "run_multi_api_server"
    else:
        branch = "run_server"
    if trace.on:
        trace.emit("serve.decision", branch=branch, headless=headless, api_server_count=api_server_count)
    return branch
