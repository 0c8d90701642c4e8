"""How a line of the log looks in a terminal: `11:59:07 [APIServer] text`, with its level where that is not INFO."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from stagetrace.terminal import DIM, RED, YELLOW, folded, painted, wants_colour, width_of_output

INDENT = 4  # of what does not fit into the line, so that it looks like no record


def formatter_for(process: str) -> logging.Formatter:
    """What standard error gets in this process, which is a terminal."""
    return TerminalFormatter(process, sys.stderr)


class TerminalFormatter(logging.Formatter):
    """Without date, pid and line of the source, which the log in a file has."""

    def __init__(self, process: str, stream: TextIO) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._process, self._stream = process, stream

    def usesTime(self) -> bool:
        return True

    def formatMessage(self, record: logging.LogRecord) -> str:
        colours = wants_colour(stream=self._stream)
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        level = painted(level, RED if record.levelno >= logging.ERROR else YELLOW, colours)
        head = painted(f"{record.asctime} [{self._process}]", DIM, colours)
        return folded(f"{head} {level}{record.message}", width_of_output(self._stream), INDENT)
