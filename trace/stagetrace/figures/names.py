"""What figures and their tables call things: short names of requests, and text in columns."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagetrace.read.terminal import cut, short_id, table


def short_names(request_ids: Iterable[str]) -> dict[str, str]:
    """A name for each request that fits into a figure: what the client called it, where that is still unambiguous."""
    ids = list(request_ids)
    for shorten in (lambda request_id: cut(short_id(request_id), 12), short_id):
        names = {request_id: shorten(request_id) for request_id in ids}
        if len(set(names.values())) == len(ids):
            return names
    return {request_id: request_id for request_id in ids}


def drawn_names(request_ids: Iterable[str]) -> dict[str, str]:
    """The same for matplotlib, which would take text between two dollar signs for a formula."""
    return {request_id: name.replace("$", r"\$") for request_id, name in short_names(request_ids).items()}


def ranges(numbers: Iterable[int]) -> str:
    """`1-3 7`: whole numbers in few characters."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def columns(header: list[str], rows: list[list[str]]) -> str:
    """A table in plain text. A column of numbers is aligned to the right."""
    words = [i for i in range(len(header)) if not all(re.fullmatch(r"[-+]?[\d.]*", row[i]) for row in rows)]
    return table(header, rows, words)


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def milliseconds(ns: int) -> str:
    """Three decimals: microseconds."""
    return f"{ns / 1e6:.3f}"
