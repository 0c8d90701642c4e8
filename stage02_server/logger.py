"""Where this process's log lines go (vllm/logger.py)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def configure_logging() -> None:
    """Everything from INFO upwards to stderr, one line per record; does nothing when logging is already set up."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT, datefmt=DATE_FORMAT)


def hide_access_log_of(paths: Collection[str]) -> None:
    """From here on uvicorn writes no line for a request to one of these paths, whatever its query."""

    def is_shown(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status
        target = record.args[2] if isinstance(record.args, tuple) and len(record.args) == 5 else ""
        return str(target).partition("?")[0] not in paths

    logging.getLogger("uvicorn.access").addFilter(is_shown)
