"""Where this process's log lines go (vllm/logger.py)."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def configure_logging() -> None:
    """Everything from INFO upwards to stderr, one line per record; does nothing when logging is already set up."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=FORMAT, datefmt=DATE_FORMAT)
