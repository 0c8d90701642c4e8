"""The command `serve`: choose the model and the form of the server, then start it (vllm/entrypoints/cli/serve.py).

`stages serve` and `python -m stage02_server serve` are this one command. It lies here, because stage 2 must run without stage 1.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stage02_server.cli_args import add_serve_args, resolve_serve_args
from stage03_engine.args import CLISubcommand, FlexibleArgumentParser, add_flags
from stage03_engine.config import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import load_feature
from stage03_engine.tracing import open_trace
from stagetrace import trace


@dataclass(frozen=True)
class LaunchArgs:
    """Which processes `serve` starts."""

    headless: bool = option(False, "start engines without an API server (not built yet)")
    api_server_count: int = option(1, "API server processes (only 1 is built)", aliases=("-asc",))


class ServeSubcommand(CLISubcommand):
    """Resolve the arguments, walk the decision tree, start the server."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `serve`."""
        parser.add_argument(
            "--dry-run", action="store_true", help="print all settings, their origin, and a start's memory; then exit"
        )
        add_serve_args(parser)
        add_flags(parser, LaunchArgs)

    def cmd(self, args: argparse.Namespace) -> int:
        """Serve until a signal ends it. Raises StagesError if the configuration is impossible."""
        serve_args = resolve_serve_args(args, LaunchArgs)
        settings = serve_args.settings
        if trace.on:
            trace.emit("serve.model_tag", model=settings["model"].value, source=settings["model"].origin)
        decide(settings["headless"].value, settings["api_server_count"].value)
        vllm_config, settings = serve_args.engine_args.create_engine_config()
        open_trace(vllm_config)
        if args.dry_run:
            table = load_feature("stage02_server.features.dry_run.table:table", "--dry-run")
            print(table(vllm_config, settings, LaunchArgs))
            return 0
        from stage02_server.api_server import serve  # late: `serve --help` needs no web framework

        return serve(vllm_config, serve_args.frontend_args)


def decide(headless: bool, api_server_count: int) -> None:
    """The decision tree of `serve`. Returns if one API server runs in this process; the other branches are not built yet.

    vLLM's branches: run_headless, run_multi_api_server, run_server. Raises ConfigError.
    """
    if headless or api_server_count < 1:
        branch = "run_headless"
    elif api_server_count > 1:
        branch = "run_multi_api_server"
    else:
        branch = "run_server"
    if trace.on:
        trace.emit("serve.decision", branch=branch, headless=headless, api_server_count=api_server_count)
    if branch == "run_headless":
        raise ConfigError("engines without an API server (headless, or api_server_count below 1) are not built yet")
    if branch == "run_multi_api_server":
        raise ConfigError(f"api_server_count = {api_server_count} is not built yet; only 1 is")
