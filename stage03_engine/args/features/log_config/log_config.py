"""The user's own set-up of the log, in the form of Python's logging.config.dictConfig (vllm/logger.py)."""

from __future__ import annotations

import json
import logging.config
from typing import Any

from stage03_engine.args.features.log_config.manifest import LogConfigFlags
from stage03_engine.errors import ConfigError


def set_up(flags: LogConfigFlags) -> bool:
    """Set the log up as the flags say; True if nothing else may. Raises ConfigError for a file that cannot be used."""
    if flags.configure_logging and flags.log_config_file is not None:
        load_log_config(flags.log_config_file)
    return not flags.configure_logging


def read_log_config(path: str) -> dict[str, Any]:
    """The JSON object in a file of `--log-config-file`. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            config: Any = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("it must hold a JSON object")
        return config
    except OSError as error:
        raise ConfigError(f"cannot read log_config_file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"log_config_file {path} cannot be used: {error}") from error


def load_log_config(path: str) -> None:
    """Set logging up as the file says. Raises ConfigError.

    Loggers that exist already stay, unless the file says otherwise: Python's default would silence the server's own.
    """
    config = read_log_config(path)
    try:
        logging.config.dictConfig({"disable_existing_loggers": False} | config)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"log_config_file {path} cannot be used: {error}") from error
