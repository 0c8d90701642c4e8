"""The command `serve`: choose the model and the form of the server, then start it (vllm/entrypoints/cli/serve.py).

`stages serve` and `python -m stage02_server serve` are this one command. It lies here, because stage 2 must run without stage 1.
"""

from __future__ import annotations

import argparse

from stage02_server.cli_args import add_serve_args, resolve_serve_args
from stage03_engine.args import CLISubcommand, FlexibleArgumentParser
from stage03_engine.mixins import load_feature
from stage03_engine.tracing import open_trace
from stagetrace import trace

HEADLESS = "stage03_engine.nodes.headless:run_headless"
SEVERAL = "stage02_server.features.api_servers.launch:run_multi_api_server"


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
        serve_args = resolve_serve_args(args)
        settings, frontend_args = serve_args.settings, serve_args.frontend_args
        if trace.on:
            trace.emit("serve.model_tag", model=settings["model"].value, source=settings["model"].origin)
        count = getattr(frontend_args, "api_server_count", None)
        branch = decide(getattr(frontend_args, "headless", False), 1 if count is None else count)
        vllm_config, settings = serve_args.engine_args.create_engine_config()
        if branch == "run_headless" and not args.dry_run:  # its trace begins later: the head knows the run's id
            return load_feature(HEADLESS, "headless")(vllm_config)
        open_trace(vllm_config)
        if args.dry_run:
            table = load_feature("stage02_server.features.dry_run.table:table", "--dry-run")
            print(table(vllm_config, settings))
            return 0
        if branch == "run_multi_api_server":
            return load_feature(SEVERAL, "api_server_count above 1")(vllm_config, frontend_args)
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
