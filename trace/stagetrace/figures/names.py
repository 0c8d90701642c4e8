"""What figures and their tables call things: short names of requests, and text in columns."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PARTS = re.compile(r"(?P<child>\d+_)?(?:chatcmpl-|cmpl-)?(?P<name>.+?)(?:-[0-9a-f]{8})?(?P<prompt>-\d+)?")


def _short(request_id: str) -> str:
    """`cmpl-r0-b281c1bc-0` is r0, its second prompt r0-1, and `1_cmpl-r0-b281c1bc-0`, the second answer, r0.1."""
    parts = _PARTS.fullmatch(request_id)
    if parts is None:
        return request_id
    name = parts["name"][:8] if re.fullmatch("[0-9a-f]{32}", parts["name"]) else parts["name"]
    prompt = parts["prompt"] if parts["prompt"] not in (None, "-0") else ""
    return name + prompt + (f".{parts['child'][:-1]}" if parts["child"] else "")


def short_names(request_ids: Iterable[str]) -> dict[str, str]:
    """A name for each request that fits into a figure: what the client called it, where that is still unambiguous."""
    ids = list(request_ids)
    names = {request_id: _short(request_id) for request_id in ids}
    taken = list(names.values())
    return {request_id: name if taken.count(name) == 1 else request_id for request_id, name in names.items()}


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
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [bool(rows) and all(re.fullmatch(r"[-+]?[\d.]*", row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def milliseconds(ns: int) -> str:
    """Three decimals: microseconds."""
    return f"{ns / 1e6:.3f}"
