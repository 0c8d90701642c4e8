"""What a terminal is given: colours where it has them, lines that end between two words, and a quiet end when nobody reads on.

The one place that decides it, for the commands of all stages. vLLM has no counterpart: its lines wrap where they happen to.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

RESET, BOLD, DIM, RED, YELLOW = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m"
PIPE_WIDTH = 120  # columns when the output is no terminal
COUNTED_AFTER = 1.0  # seconds: what takes less is not counted
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PARTS = re.compile(r" +|[^ ]+")
_T = TypeVar("_T")


def wants_colour(choice: str = "auto", stream: TextIO | None = None) -> bool:
    """What `--color` asks for, here and now. `auto`: no colour with NO_COLOR, else one with FORCE_COLOR (no-color.org, force-color.org),
    none with TERM=dumb, and else one where the stream, by default standard output, is a terminal."""
    if choice != "auto":
        return choice == "always"
    for variable, wanted in (("NO_COLOR", False), ("FORCE_COLOR", True)):
        if os.environ.get(variable):
            return wanted
    return os.environ.get("TERM") != "dumb" and is_terminal(stream or sys.stdout)


def is_terminal(stream: TextIO) -> bool:
    """Does a person see what is written to it? False for one that is closed."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def counted(things: Collection[_T], what: str) -> Iterable[_T]:
    """The same things. While they take long, standard error says how far `what` is, if it is a terminal."""
    if not is_terminal(sys.stderr):
        return things
    from tqdm import tqdm

    return tqdm(things, desc=what, leave=False, delay=COUNTED_AFTER)


def width_of_output(stream: TextIO | None = None) -> int:
    """Columns of the terminal (COLUMNS overrides), or PIPE_WIDTH."""
    with suppress(ValueError, OSError, AttributeError):
        wanted = max(0, int(os.environ.get("COLUMNS", 0)))
        return (
            wanted or os.get_terminal_size((stream or sys.stdout).fileno()).columns or PIPE_WIDTH
        )  # a new pty has 0 columns
    return PIPE_WIDTH


def painted(text: str, colour: str, wanted: bool) -> str:
    """The text in a colour, if that is wanted."""
    return f"{colour}{text}{RESET}" if wanted and text else text


def folded(line: str, width: int, indent: int | None = None) -> str:
    """The line in pieces of at most `width` columns, broken at spaces only: a word that is wider stays whole, so that what is copied is
    whole too. Further pieces begin at `indent`; by default where the last column of a table begins, or two columns further in."""
    if len(_COLOUR.sub("", line)) <= width:
        return line
    pieces, piece, column, start = list[str](), "", 0, -1
    for part in _PARTS.findall(line):
        size = len(_COLOUR.sub("", part))
        if part[0] != " " and column > 0 and column + size > width and piece.strip():
            if indent is None:
                indent = _last_column(pieces[0] if pieces else piece, width)
            pieces.append(piece.rstrip())
            piece, column = " " * indent, indent
        elif part[0] == " " and column == start and pieces:
            continue
        piece, column = piece + part, column + size
    return "\n".join([*pieces, piece.rstrip()] if piece.strip() else pieces)


def shortened(line: str, width: int) -> str:
    """As many of the line's words as `width` columns hold, and an ellipsis for the others."""
    if len(line) <= width:
        return line
    return line[: width - 1].rpartition(" ")[0].rstrip() + " …"


def _last_column(line: str, width: int) -> int:
    """Where the text behind the last wide gap begins, in the left two thirds of the line."""
    found = [match.end() for match in re.finditer(r"(?<=[^ ])  +", _COLOUR.sub("", line))]
    return max((at for at in found if at <= width * 2 // 3), default=2 + len(line) - len(line.lstrip()))


class _WholeWords:
    """A terminal as a stream: lines that are too wide are folded. What is written piece by piece (an answer, as it comes) is not."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest, self._is_open = stream, "", False

    def write(self, text: str) -> int:
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            whole = line if self._is_open else folded(line, width_of_output(self._stream))
            self._stream.write(whole + "\n")
            self._is_open = False
        self._rest = rest
        return len(text)

    def flush(self) -> None:
        if self._rest:  # the beginning of a line that goes on
            rest, self._rest, self._is_open = self._rest, "", True
            self._stream.write(rest)
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def whole_words() -> Iterator[None]:
    """Inside the `with` block standard output breaks its lines between words, if it is a terminal."""
    stream = sys.stdout
    if not is_terminal(stream):
        yield
        return
    sys.stdout = _WholeWords(stream)
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        sys.stdout = stream


def complain(program: str, what: str) -> None:
    """`program: error: what` on standard error: one line; in a terminal folded, and red where it has colours."""
    if is_terminal(sys.stderr):
        head = painted(f"{program}: error:", RED, wants_colour(stream=sys.stderr))
        print(folded(f"{head} {what}", width_of_output(sys.stderr)), file=sys.stderr)
    else:  # whoever reads it there looks for these words
        print(f"{program}: error: {what}", file=sys.stderr)


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """`... | head`: once nobody reads the rest, the `with` block ends with SystemExit(0), however it would have ended, and Python does not
    try to write the rest at its end."""
    try:
        try:
            yield
        finally:  # also behind the SystemExit of `--help`
            sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # `2>&1 | head`
            _let_go(stream)
        raise SystemExit(0) from None


def _let_go(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, which breaks lines at hyphens too, and so in the middle of a flag, and leaves long names of flags to the terminal."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = super()._format_action_invocation(action)
        return folded(names, self._width - self._current_indent, self._current_indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(
            " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip


class RawHelpFormatter(HelpFormatter):
    """The same, with the lines of description and epilog as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(folded(indent + line, width) for line in text.splitlines())
