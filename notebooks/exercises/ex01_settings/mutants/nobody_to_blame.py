"""Misconception: the error of the conversion says enough; but which of forty variables was it?"""

from __future__ import annotations

from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import did_you_mean, with_dashes
from stage03_engine.args.resolve import Resolved, decide as reference, with_detected
from stage03_engine.errors import ConfigError

__all__ = ["did_you_mean", "parse_int", "with_dashes", "with_detected"]
REJECTED = "is refused with a ConfigError that names the flag"


def decide(setting, given, environ, from_file, config_file) -> Resolved:
    try:
        return reference(setting, given, environ, from_file, config_file)
    except ConfigError as error:
        raise ConfigError(str(error).rpartition(": ")[2]) from None
