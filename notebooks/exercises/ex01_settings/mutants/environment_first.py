"""Misconception: the environment overrides the command line, as in some deployment tools."""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide as reference, with_detected

__all__ = ["did_you_mean", "parse_int", "with_dashes", "with_detected"]
REJECTED = "The command line decides before the environment"


def decide(setting, given, environ, from_file, config_file) -> Resolved:
    return reference(setting, {} if environ.get(setting.variable) else given, environ, from_file, config_file)
