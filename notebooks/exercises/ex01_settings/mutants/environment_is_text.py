"""Misconception: a variable is text, so the setting is the text "0" (which, as a condition, is true)."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide as reference, with_detected

__all__ = ["did_you_mean", "parse_int", "with_dashes", "with_detected"]
REJECTED = "A value has the setting's type, whichever source it comes from."


def decide(setting, given, environ, from_file, config_file) -> Resolved:
    found = reference(setting, given, environ, from_file, config_file)
    return Resolved(environ[found.detail], found.source, found.detail) if found.source == "environment" else found
