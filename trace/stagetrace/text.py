"""Text from outside, such as a client's: in one line, and without power over the terminal that shows it."""

from __future__ import annotations

import logging
from typing import Any

MOST = 256
"""Characters of a text that a client chooses freely, in an event that needs no leave."""


def printable(text: str) -> str:
    """Without characters that would control a terminal, or end a line: they are shown as Python writes them, `\\\\x1b`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def bounded(text: str) -> str:
    """The printable text, of at most MOST characters; a longer one ends with three dots."""
    text = printable(text[:MOST]) + ("..." if len(text) > MOST else "")
    return text if len(text) <= MOST else text[: MOST - 3] + "..."


class OneLineRecord(logging.LogRecord):
    """A record whose message is one line, whoever formats it: what it quotes, of a client or a file, can neither begin another line
    nor control a terminal. The lines of a traceback are indented, so that none of them looks like a record."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            lines = logging.Formatter().formatException(self.exc_info).splitlines()
            self.exc_text = "\n".join("    " + printable(line) for line in lines)

    def getMessage(self) -> str:
        return printable(super().getMessage().rstrip("\n"))
