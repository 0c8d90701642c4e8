"""The process before the server starts: its access log and its open files (vllm/utils/system_utils.py set_ulimit)."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import sys
from collections.abc import Collection

from stage02_server.features.hardening.log_limit import limit_log
from stage02_server.features.hardening.manifest import HardeningFlags

MAX_OPEN_FILES = 65535
ADDRESS = re.compile(r"[0-9A-Fa-f.:%\[\]]*")
MAX_DIGITS = 640  # of an integer in JSON, Python's lowest limit: reading one takes time with the square of its length


def prepare(args: HardeningFlags) -> None:
    """Set up this process as the flags say."""
    if args.forwarded_allow_ips:
        quote_odd_clients()
    if args.disable_access_log_for_endpoints is not None:
        hide_access_log_of(args.disable_access_log_for_endpoints.split(","))
    limit_log(args.max_log_lines)
    set_ulimit()
    sys.set_int_max_str_digits(MAX_DIGITS)


def quote_odd_clients() -> None:
    """Whoever a believed proxy names as its client stands in quotes in the access log if that is no address: else it could pass
    for the beginning of another line's text."""

    def quote(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5 and not ADDRESS.fullmatch(str(record.args[0])):
            record.args = (repr(record.args[0]), *record.args[1:])
        return True

    logging.getLogger("uvicorn.access").addFilter(quote)


def hide_access_log_of(paths: Collection[str]) -> None:
    """Keep uvicorn from logging requests to these paths, whatever their query."""

    def is_shown(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status
        target = record.args[2] if isinstance(record.args, tuple) and len(record.args) == 5 else ""
        return str(target).partition("?")[0] not in paths

    logging.getLogger("uvicorn.access").addFilter(is_shown)


def set_ulimit() -> None:
    """Let this process and its children open as many files as the system allows, up to MAX_OPEN_FILES: each connection is one,
    and the usual limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS names no limit, and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
