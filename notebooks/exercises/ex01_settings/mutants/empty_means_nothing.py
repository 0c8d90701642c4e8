"""Misconception: `given.get(name) or ...`; a source that says 0 or false has said nothing."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide as reference, with_detected

__all__ = ["did_you_mean", "parse_int", "with_dashes", "with_detected"]
REJECTED = "A source that names a setting decides it, even with 0, false, none or an empty text"


def decide(setting, given, environ, from_file, config_file) -> Resolved:
    given = {name: value for name, value in given.items() if value}
    return reference(setting, given, environ, from_file, config_file)
