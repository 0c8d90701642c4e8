"""The command `router` and its flags (vLLM: the toy proxy of its examples, and the project vllm-router)."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stage02_server.features.hardening.manifest import HardeningFlags
from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.fields import add_flags, check_at_least, option, settings_of
from stage03_engine.args.log import configure_logging, name_process
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.args.resolve import resolve_cli
from stage03_engine.config import LOG_LEVELS, ObservabilityConfig
from stage03_engine.errors import ConfigError
from stagetrace import trace

MOST_SERVERS = 64  # of each kind


@dataclass(frozen=True)
class RouterFlags:
    """Which servers, and how long they may take."""

    prefill: tuple[str, ...] = option((), "addresses of servers that compute prompts, such as http://127.0.0.1:8100")
    decode: tuple[str, ...] = option((), "addresses of servers that write the answers, such as http://127.0.0.1:8200")
    host: str | None = option(None, "address to listen on; all interfaces if not given")
    port: int = option(8000, "port to listen on; 0 takes a free one", at_least=0)
    max_concurrent_requests: int = option(1024, "most requests in progress at once (429 beyond)", at_least=1)
    prefill_timeout_secs: float = option(
        60,
        "seconds that a prefill server may take for a prompt; after that a decode server computes it",
        at_least=0.001,
    )
    request_timeout_secs: float = option(
        1800, "seconds of silence after which the router gives up a request at a decode server", at_least=0.001
    )
    health_check_interval_secs: float = option(
        5,
        "seconds between two looks at a server's /health; 1 at most while one is not ready",
        at_least=0.01,
    )
    shutdown_timeout: int = option(30, "seconds that running requests get to finish after SIGTERM", at_least=0)
    log_level: str = option("INFO", "least level of our own lines in the log", LOG_LEVELS)
    trace: str | None = option(None, "folder to write a trace file to")
    trace_console: bool = option(False, "print [TRACE] lines to stderr")

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        check_at_least(self)
        if self.port > 65535:
            raise ConfigError(f"port must be in [0, 65535], not {self.port}")
        for name in ("prefill", "decode"):
            urls = getattr(self, name)
            if not 0 < len(urls) <= MOST_SERVERS:
                raise ConfigError(
                    f"router needs the address of at least one {name} server: --{name} http://HOST:PORT ({MOST_SERVERS} at most)"
                )
            if len({check_url(name, url) for url in urls}) < len(urls):
                raise ConfigError(f"--{name} names a server twice")


_OF_AN_ENGINE = ("max_tokenize_characters", "max_answers_per_key", "max_settings_bytes", "shared_prefix_cache", "event_loop_held_seconds")  # fmt: skip
_HINTS = typing.get_type_hints(HardeningFlags)
RouterLimits: Any = dataclasses.make_dataclass(
    "RouterLimits",
    [
        (each.name, _HINTS[each.name], dataclasses.field(default=each.default, repr=each.repr, metadata=each.metadata))
        for each in dataclasses.fields(HardeningFlags)
        if each.name not in _OF_AN_ENGINE
    ],
    namespace={"__doc__": HardeningFlags.__doc__},
    frozen=True,
)
"""The flags of a server's HTTP side, without those about an engine."""


def check_url(name: str, url: str) -> str:
    """The address without a slash at its end. Raises ConfigError."""
    import httpx  # late: `router --help` does not need it

    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(httpx.URL(url).host) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_url = False
    if (
        not is_url
        or not url.isascii()
        or not url.isprintable()
        or " " in url
        or "@" in url
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(f"--{name} takes addresses such as http://127.0.0.1:8100, not {url[:200]!r}")
    return url.rstrip("/")


class RouterSubcommand(CLISubcommand):
    """Send prompts to prefill servers, and all else to decode servers."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """Its own flags, and those that bound what a client can do."""
        parser.usage = "%(prog)s --prefill URL [URL ...] --decode URL [URL ...] [FLAGS]"
        add_flags(parser, RouterFlags)
        add_flags(parser, RouterLimits)

    def cmd(self, args: argparse.Namespace) -> int:
        """Route until a signal ends it. Raises StagesError if it cannot start."""
        settings = [*settings_of(RouterFlags), *settings_of(RouterLimits)]
        values = {name: one.value for name, one in resolve_cli(settings, args).items()}
        flags = RouterFlags(**{each.name: values[each.name] for each in settings_of(RouterFlags)})
        flags.check()
        limits = HardeningFlags(**{each.name: values[each.name] for each in settings_of(RouterLimits)})
        check_at_least(limits)
        limits.check()
        name_process("Router")
        configure_logging("Router", ObservabilityConfig(log_level=flags.log_level))
        open_trace(flags)
        from stage02_server.features.router.app import serve  # late: `router --help` needs no web framework

        return serve(flags, limits)


def open_trace(flags: RouterFlags) -> None:
    """Raises ConfigError if the folder cannot be written."""
    if flags.trace is None and not flags.trace_console:
        return
    trace.hold("Router")
    try:
        trace.open(flags.trace, console=flags.trace_console)
    except OSError as error:
        raise ConfigError(f"cannot write traces to {flags.trace!r}: {error.strerror or error}") from error
