"""`--api-server-count`, and the settings that need a single API server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.mixins import is_there
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage02_server.cli_args import FrontendArgs


MAX_SERVERS = 64
"""More are refused, so that a typing error cannot start thousands of processes."""
ALONE = {
    "in_process": "each server would have an engine of its own",
    "enable_server_load_tracking": "GET /load would count only the requests of one server",
    "allow_runtime_lora_updating": "each server would know only the adapters that it loaded itself",
}
"""Setting -> what would go wrong with several API servers."""
NEEDS = ("stage03_engine.core.features.front_ends", "stage03_engine.frontend.features.shared_engine")


@dataclass(frozen=True)
class ApiServerFlags:
    """Which processes `serve` starts."""

    headless: bool = option(
        False,
        "no API server: this machine works for one elsewhere (--data-parallel-address, or --master-addr and --node-rank); "
        "--api-server-count 0 says the same",
    )
    api_server_count: int | None = option(
        None,
        "API server processes in front of the same engine, each with its own event loop and tokenizer; they share the port, and "
        "/metrics is the sum over all of them; 1 if not given",
        aliases=("-asc",),
        at_least=0,
    )

    @staticmethod
    def check(args: FrontendArgs) -> None:
        """Raises ConfigError for what needs one API server."""
        if args.headless or args.api_server_count == 0:
            _check_headless(args)
        count = args.api_server_count or 1
        if count > MAX_SERVERS:
            raise ConfigError(f"api_server_count must be at most {MAX_SERVERS}, not {count}")
        if count > 1 and (missing := [name for name in NEEDS if not is_there(name)]):
            raise ConfigError(f"api_server_count above 1 needs {missing[0]}, which is not installed")
        for name, why in ALONE.items() if count > 1 else ():
            if getattr(args, name, False):
                raise ConfigError(f"{name} needs api_server_count 1: with {count}, {why}")
        stored = next((field for field in fields(args) if field.name == "max_stored_responses"), None)
        if count > 1 and stored is not None and getattr(args, stored.name) not in (0, stored.default):
            raise ConfigError(
                f"max_stored_responses needs api_server_count 1: with {count}, each server would know only its own responses, so none "
                "is stored; set it to 0, or leave it out"
            )


def _check_headless(args: Any) -> None:
    """Raises ConfigError for settings of the server that is not there."""
    if args.api_server_count:
        raise ConfigError(
            f"headless starts no API server, and api_server_count is {args.api_server_count}; leave one of them out"
        )
    if getattr(args, "engine", "core") != "core" or getattr(args, "in_process", False):
        raise ConfigError(
            "headless starts engines with a model, each in a process of its own: leave out engine and in_process"
        )


FEATURE = Feature(
    name="api_servers",
    help="several API servers behind one port",
    room=__package__,
    settings={"FrontendArgs": ApiServerFlags},
    parts=(
        Part("serve", ".launch:run_multi_api_server", key="run_multi_api_server"),
        Part("routes", ".install:install", flags=("api_server_count",)),
    ),
    after=("responses", "hardening"),  # it checks settings that they declare
    events=("api_server.ended", "api_server.restarted", "api_server.spawned", "api_server.started", "server.stopped"),
)
