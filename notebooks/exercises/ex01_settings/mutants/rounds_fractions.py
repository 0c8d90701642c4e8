"""Misconception: 1.5K is 1536, so why refuse it? A capital suffix with a fraction is nearly always a mistake."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int as reference
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import decide, with_detected

__all__ = ["decide", "did_you_mean", "with_dashes", "with_detected"]
REJECTED = "A fraction needs a lower-case suffix"


def parse_int(text: str) -> int:
    number = text.strip().rstrip("kmgtKMGT")
    if number.replace(".", "", 1).isdecimal() and "." in number.strip("."):
        return int(float(number) * reference("1" + text.strip()[len(number) :]))
    return reference(text)
