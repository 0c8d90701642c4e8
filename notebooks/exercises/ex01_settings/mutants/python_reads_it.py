"""Misconception: where there is no suffix, Python's int() is the parser; it also takes 1_000 and digits of every script."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int as reference
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import decide, with_detected

__all__ = ["decide", "did_you_mean", "with_dashes", "with_detected"]
REJECTED = "however much Python's int() would like it"


def parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return reference(text)
