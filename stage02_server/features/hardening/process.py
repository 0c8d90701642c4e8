"""The process before the server starts: its log and its open files (vllm/logger.py, vllm/utils/system_utils.py set_ulimit)."""

from __future__ import annotations

import json
import logging.config
import resource
from collections.abc import Collection
from typing import Any

from stage02_server.features.hardening.flags import HardeningFlags
from stage03_engine.errors import ConfigError

MAX_OPEN_FILES = 65535


def prepare(args: HardeningFlags) -> None:
    """Set up this process as the flags say. Raises ConfigError for a log configuration that cannot be used."""
    if args.log_config_file is not None:
        load_log_config(args.log_config_file)
    if args.disable_access_log_for_endpoints is not None:
        hide_access_log_of(args.disable_access_log_for_endpoints.split(","))
    set_ulimit()


def load_log_config(path: str) -> None:
    """Set logging up as the JSON file says, in the form of Python's logging.config.dictConfig. Raises ConfigError.

    Loggers that exist already stay, unless the file says otherwise: Python's default would silence the server's own.
    """
    try:
        with open(path, encoding="utf-8") as file:
            config: Any = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("it must hold a JSON object")
        logging.config.dictConfig({"disable_existing_loggers": False} | config)
    except OSError as error:
        raise ConfigError(f"cannot read log_config_file {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"log_config_file {path} cannot be used: {error}") from error


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
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
