"""What is said of a name that nobody knows: it may belong to a feature that is not installed, and is then refused. What protects must not be
able to get lost without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.plugins import absent_features, find


def refuse_absent(name: str) -> None:
    """Raises ConfigError if a feature is not installed to which this unknown flag, variable or key may belong."""
    if absent := absent_features():
        raise ConfigError(f"{name} is unknown here, where {_named(absent)} is not installed")


def check_unknown_fields(fields: Mapping[str, object], table: str) -> None:
    """`fields` are those of a request that its model does not have, `table` says which that are refused. Raises InvalidRequestError for
    one of these that asks for something, or that may belong to a feature that is not installed; others are ignored, as in vLLM."""
    check_refused = find("engine", "refused_fields")
    known = () if check_refused is None else check_refused(fields, table)
    absent = absent_features("stage02_server")
    for name, value in fields.items():
        if absent and name not in known and value not in (None, False, 0, "", [], {}):
            raise InvalidRequestError(
                f"{name} is unknown here, where {_named(absent)} is not installed; leave it out.", name
            )


def _named(absent: Collection[str]) -> str:
    """`a`, `a or b`, or `one of N features`: which of them it was can no longer be told."""
    return " or ".join(absent) if len(absent) < 3 else f"one of {len(absent)} features"
