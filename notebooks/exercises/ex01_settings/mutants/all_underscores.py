"""Misconception: replace every underscore of a word that begins with two dashes; --model=my_model then names another model."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean
from stage03_engine.args.resolve import decide, with_detected

__all__ = ["decide", "did_you_mean", "parse_int", "with_detected"]
REJECTED = "['--a-b=c-d']"


def with_dashes(args) -> list[str]:
    return [word.replace("_", "-") if word.startswith("--") else word for word in args]
