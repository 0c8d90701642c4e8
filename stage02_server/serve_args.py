"""The arguments of `serve`: those of the engine and those of the HTTP server, parsed and resolved together.

`stages serve` and `python -m stage02_server serve` share them. Source: vllm/entrypoints/openai/cli_args.py
(make_arg_parser, validate_parsed_serve_args). Imports no web framework.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from stage02_server.cli_args import FrontendArgs
from stage02_server.features.hardening.flags import check_http_flags
from stage03_engine.arg_utils import AsyncEngineArgs, engine_settings
from stage03_engine.args import FlexibleArgumentParser, Resolved, add_flags, resolve_cli, settings_of
from stage03_engine.errors import ConfigError

EPILOG = (
    "--help=listgroup names the groups, --help=SchedulerConfig shows one, --help=cache all flags with that word in "
    "their names. Each setting is a variable too (STAGES_MAX_NUM_SEQS=8), and a key in the file of --config "
    "(max-num-seqs: 8). A switch --enable-x has the opposites --no-enable-x and --disable-x. vLLM's other flags are "
    "known: what is not built is accepted at the value that asks for nothing, and refused with the reason at any other."
)


@dataclass(frozen=True)
class ServeArgs:
    """What `serve` was asked to do, before the model is looked for."""

    engine_args: AsyncEngineArgs
    frontend_args: FrontendArgs
    settings: dict[str, Resolved]  # every setting of both, and of the sections that the command added


def add_serve_args(parser: FlexibleArgumentParser) -> None:
    """Add the positional model, `--config`, and the flags of the HTTP server and of the engine."""
    parser.usage = "%(prog)s [MODEL] [FLAGS]"  # argparse would list all flags twice
    parser.epilog = EPILOG
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="model to serve, the same as --model")
    AsyncEngineArgs.add_cli_args(parser)
    add_flags(parser, FrontendArgs)
    parser.refuse("server")


def resolve_serve_args(args: argparse.Namespace, *more_sections: type) -> ServeArgs:
    """Resolve all settings from command line, environment, config file and defaults.

    `more_sections` are dataclasses whose flags the command added itself. Raises ConfigError.
    """
    frontend_settings = settings_of(FrontendArgs)
    more = [setting for section in more_sections for setting in settings_of(section)]
    known = [*engine_settings(), *frontend_settings, *more]
    settings = resolve_cli(known, args, refused_tables=["engine", "server"])
    frontend_args = FrontendArgs(**{field.name: settings[field.name].value for field in fields(FrontendArgs)})
    _check_frontend(frontend_args)
    return ServeArgs(AsyncEngineArgs(settings), frontend_args, settings)


def _check_frontend(args: FrontendArgs) -> None:
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], not {args.port}")
    if args.in_process and args.engine == "echo":
        raise ConfigError("in_process is about the real engine; the echo engine runs in the API process anyway")
    if args.max_queue_len is not None and args.max_queue_len < 1:
        raise ConfigError(f"max_queue_len must be at least 1, not {args.max_queue_len}; leave it out for no limit")
    if args.max_stored_responses < 0:
        raise ConfigError(f"max_stored_responses must be at least 0, not {args.max_stored_responses}")
    timeouts = ("request_header_timeout", "request_body_timeout", "response_stall_timeout")
    for name in ("shutdown_timeout", "timeout_keep_alive", "sse_keep_alive_interval", *timeouts):
        if getattr(args, name) < 0:
            raise ConfigError(f"{name} must be at least 0 seconds, not {getattr(args, name)}")
    check_http_flags(args)
