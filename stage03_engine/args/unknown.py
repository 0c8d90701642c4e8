"""What to do about an unknown name: a flag, a key, a field of a request, a variable (vllm/platforms/interface.py, validate_environ).

It may belong to a feature that is not installed. Then it is refused: a protection must never be dropped silently.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.plugins import PLUGINS, absent_features, features, find

if TYPE_CHECKING:
    from stage03_engine.args.resolve import Resolved

logger = logging.getLogger(__name__)
OURS = ("VLLM_", "STAGES_", "FORWARDED_ALLOW_IPS")
"""Prefixes of the environment variables that are meant for this program; the last is uvicorn's own."""
SERVER_SETTINGS = (
    "host", "port", "served_model_name", "chat_template", "response_role", "shutdown_timeout",
)  # fmt: skip
"""Settings of the stages above, which only their own commands know."""


def refuse_absent(name: str) -> None:
    """Raises ConfigError if this unknown flag, variable or key may belong to a feature that is not installed."""
    if absent := absent_features():
        raise ConfigError(f"{name} is unknown here, where {_named(absent)} is not installed")


def check_unknown_fields(given: Mapping[str, object], table: str) -> None:
    """`given` are fields that the request's model does not have; `table` names the refused ones. Raises InvalidRequestError for a
    refused field that asks for something, and for one that may belong to a feature that is not installed; others are ignored, as in vLLM."""
    check_refused = find("engine", "refused_fields")
    known = () if check_refused is None else check_refused(given, table)
    absent = absent_features("stage02_server")
    for name, value in given.items():
        if absent and name not in known and value not in (None, False, 0, "", [], {}):
            raise InvalidRequestError(
                f"{name} is unknown here, where {_named(absent)} is not installed; leave it out.", name
            )


def _named(absent: Collection[str]) -> str:
    """`a`, `a or b`, or `one of N features`: which of them it was can no longer be told."""
    return " or ".join(absent) if len(absent) < 3 else f"one of {len(absent)} features"


def unread_variables(environ: Mapping[str, str], settings: set[str]) -> list[str]:
    """The variables of vLLM and of this project that are set, even to nothing, and that nothing reads. `settings` names the
    settings that the command knows; those of other commands count too."""
    settings = settings | feature_settings() | set(SERVER_SETTINGS)
    known = {PLUGINS, *("STAGES_" + name.upper() for name in settings)}
    known.update(name for feature in features() for name in feature.variables)
    if read_variables := find("engine", "read_variables"):
        known |= read_variables(settings)
    return sorted(name for name in environ if name.startswith(OURS) and name not in known)


def feature_settings() -> set[str]:
    """The names of all settings of features, of whatever stage."""
    kinds = (kind for feature in features() for kind in feature.settings.values() if is_dataclass(kind))
    inner = (section for kind in kinds for section in (kind, *(type(each.default) for each in fields(kind))))
    return {each.name for section in inner if is_dataclass(section) for each in fields(section)}


def check_variables(environ: Mapping[str, str], settings: Mapping[str, Resolved]) -> None:
    """Warn once about the variables that nothing reads. Raises ConfigError instead with --fail-on-environ-validation, and if one may
    belong to a feature that is not installed: a server must not start open because nothing reads the variable with its key.

    `settings` maps the name of each setting that the command knows to its value and source.
    """
    if not any(name.startswith(OURS) for name in environ):
        return
    unread = unread_variables(environ, set(settings))
    if unread:
        refuse_absent(f"environment variable {unread[0]}")
    unread = [name for name in unread if environ[name]]  # else an empty one counts as not set
    if not unread:
        return
    said = f"set, but nothing here reads {'it' if len(unread) == 1 else 'them'}: {', '.join(unread)}"
    strict = settings.get("fail_on_environ_validation")
    if strict is not None and strict.value:
        raise ConfigError(f"environment variables that are {said}")
    logger.warning("Environment variables that are %s", said)
