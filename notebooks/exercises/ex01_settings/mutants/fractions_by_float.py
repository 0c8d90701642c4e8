"""Misconception: float() reads the number and int() makes it whole; a float has 53 bits, and 2**53 + 1 is not among them."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int as reference
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import decide, with_detected

__all__ = ["decide", "did_you_mean", "with_dashes", "with_detected"]
REJECTED = "no digit is lost on the way"


def parse_int(text: str) -> int:
    return int(float(reference(text)))
