"""Misconception: a bare -- is a word like any other; but what follows it is no flag, whatever it looks like."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes as reference
from stage03_engine.args.resolve import decide, with_detected

__all__ = ["decide", "did_you_mean", "parse_int", "with_detected"]
REJECTED = "['--', '--a-b']"


def with_dashes(args) -> list[str]:
    return [word if word == "--" else reference([word])[0] for word in args]
