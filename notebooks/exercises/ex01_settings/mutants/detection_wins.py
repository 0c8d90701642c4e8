"""Misconception: what was detected on this machine is right, whatever the user says."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide

__all__ = ["decide", "did_you_mean", "parse_int", "with_dashes"]
REJECTED = "overwrites nothing that somebody decided"


def with_detected(resolved, detected) -> dict[str, Resolved]:
    return {**resolved, **{name: Resolved(value, "detected", why) for name, (value, why) in detected.items()}}
