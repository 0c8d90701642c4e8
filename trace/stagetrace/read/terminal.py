"""How recordings look in a terminal: the colours of phases, times, short names, tables."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from stagetrace.ids import KIND
from stagetrace.text import printable

_PHASE_COLOURS = [90, 36, 36, 34, 34, 35, 33, 33, 32, 96]  # of phases 0-9; neighbours that belong together are alike


def add_colour(parser: argparse.ArgumentParser) -> None:
    """`--color`, as other programs call it."""
    parser.add_argument(
        "--color", choices=["auto", "always", "never"], default="auto",
        help="auto: colours in a terminal, unless NO_COLOR is set; with FORCE_COLOR everywhere",
    )  # fmt: skip


def phase_colour(phase: int) -> str:
    """The escape sequence that begins a phase's colour. The phase's number is always printed too."""
    return f"\x1b[{_PHASE_COLOURS[phase]}m" if 0 <= phase <= 9 else ""


def milliseconds(ns: float | None) -> str:
    """Three digits after the point below 10 ms, one above; - for None."""
    if ns is None:
        return "-"
    return f"{ns / 1e6:.3f}" if abs(ns) < 1e7 else f"{ns / 1e6:.1f}"


def short_id(request_id: str) -> str:
    """What a reader recognises of a request's id; further prompts and answers of one request keep their number.

    `cmpl-r0-b281c1bc-0` is r0 (what the client called it), `1_chatcmpl-4f1c...-2` is 1_4f1c2a77#2.
    """
    match = _ENGINE_ID.fullmatch(request_id)
    if match is None:
        return printable(request_id)
    answer, name, prompt = match.groups()
    name = name[:8] if _HEX.fullmatch(name) else name
    return (answer or "") + printable(name) + (f"#{prompt}" if prompt != "0" else "")


_ENGINE_ID = re.compile(rf"((?:\d+|beam\d+\.\d+)_)?{KIND}(.+?)(?:-[0-9a-f]{{8}})?-(\d+)")
_HEX = re.compile(r"[0-9a-f]{32}")


def say(line: str) -> None:
    """Print a line without colours. What it quotes of a recording, which may be anybody's, does not control the terminal."""
    print(printable(line))


def ascii_if_needed(text: str) -> str:
    """The text as the output can write it: drawn with ASCII where it cannot write lines and arrows."""
    encoding = sys.stdout.encoding or "ascii"
    if encoding.lower().replace("-", "") == "utf8":
        return text
    return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)


_ASCII = str.maketrans("│─╰▶◀…·█▒░", "|-`><~.##:")


def cut(text: str, width: int) -> str:
    """At most this many characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Columns under their names, numbers to the right, those in `left` to the left."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
