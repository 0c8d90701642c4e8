"""The arguments of `serve`: those of the engine and of the HTTP server, parsed and resolved together.

`stages serve` and `python -m stage02_server serve` share them. Source: vllm/entrypoints/common/cli_args.py (FrontendArgs,
make_arg_parser, validate_parsed_serve_args). Imports no web framework.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from stage03_engine.arg_utils import AsyncEngineArgs, engine_settings
from stage03_engine.args.check import check_conflicts
from stage03_engine.args.fields import add_flags, check_at_least, settings_of
from stage03_engine.args.log import log_of_server
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import Resolved, resolve_cli
from stage03_engine.config import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import each
from stage03_engine.plugins import Section, loaded, settings as settings_of_features, with_features


@dataclass(frozen=True)
class BaseFrontendArgs:
    """Flags of `serve` beside those of the engine."""

    host: str | None = option(None, "address to listen on; all interfaces if not given")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] | None = option(
        None, "names that requests may use for the model; its own if not given"
    )
    chat_template: str | None = option(None, "Jinja chat template, as a file or as text; replaces the model's own")
    response_role: str = option("assistant", "role of the answering message in chats")
    shutdown_timeout: int = option(30, "seconds that running requests get to finish after SIGTERM", at_least=0)


@with_features
@dataclass(frozen=True)
class FrontendArgs(BaseFrontendArgs, Section):
    """All of them, with those of the features."""

    def check(self) -> None:
        """Raises ConfigError for the first setting that is impossible."""
        check_at_least(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], not {self.port}")
        check_conflicts([self], "stage02_server")
        for check in each(FrontendArgs, "check"):
            check(self)


EPILOG = (
    "Each setting is an environment variable too (STAGES_MAX_NUM_SEQS=8). "
    "A switch --enable-x has the opposites --no-enable-x and --disable-x."
)


@dataclass(frozen=True)
class ServeArgs:
    """What `serve` was asked to do, before the model is located."""

    engine_args: AsyncEngineArgs
    frontend_args: FrontendArgs
    settings: dict[str, Resolved]  # every setting of both


def add_serve_args(parser: FlexibleArgumentParser) -> None:
    """Add the positional model, `--config`, and the flags of the HTTP server and of the engine."""
    parser.usage = "%(prog)s [MODEL] [FLAGS]"  # argparse would list all flags twice
    parser.epilog = " ".join([EPILOG, *loaded("engine", "epilog")])
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="model to serve, the same as --model")
    AsyncEngineArgs.add_cli_args(parser)
    for group in (BaseFrontendArgs, *settings_of_features("FrontendArgs", "stage02_server")):
        add_flags(parser, group)
    parser.refuse("server")


def resolve_serve_args(args: argparse.Namespace) -> ServeArgs:
    """Resolve all settings from command line, environment, config file and defaults, and set up the log. Raises ConfigError."""
    known = [*engine_settings(), *settings_of(FrontendArgs)]
    settings = resolve_cli(known, args, refused_tables=["engine", "server"])
    frontend_args = FrontendArgs(**{field.name: settings[field.name].value for field in fields(FrontendArgs)})
    frontend_args.check()
    log_of_server(settings, dry_run=getattr(args, "dry_run", False))
    return ServeArgs(AsyncEngineArgs(settings), frontend_args, settings)
