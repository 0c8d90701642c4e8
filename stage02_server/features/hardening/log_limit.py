"""`--max-log-lines`: a flood of requests does not flood the log (vLLM logs each request, and each wrong one, without a limit).

A line can cost more than its request: the loop formats and writes lines one by one, and they fill the disk. Each logger has its own
share, so that a flood of one kind (access lines, say) hides no line of another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass
class _Second:
    """What one logger wrote in the second that began at `began`."""

    began: float
    lines: int = 0
    left_out: int = 0


class LogLimit(logging.Filter):
    """Lets so many records of each logger pass in a second; the first one after it says how many were left out. Errors and worse always
    pass: each is a defect, and the log is where its traceback is."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = most, clock
        self._seconds: dict[str, _Second] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Should it be written?"""
        if record.levelno >= logging.ERROR or record.name == __name__:
            return True
        now = self._clock()
        second = self._seconds.get(record.name)
        if second is None or now - second.began >= 1:
            self._seconds[record.name] = _Second(now, 1)
            if second is not None and second.left_out:
                logger.warning("%d lines of %s were left out (--max-log-lines).", second.left_out, record.name)
            return True
        within = second.lines < self._most
        second.lines += within
        second.left_out += not within
        return within


def limit_log(most: int) -> None:
    """Put the limit before all that writes this process's log; 0 = no limit."""
    for handler in logging.getLogger().handlers if most else ():
        handler.addFilter(LogLimit(most))
