"""A setting that is JSON, key by key on the command line (vLLM: FlexibleArgumentParser)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stage03_engine.errors import ConfigError


def joined(args: Sequence[str]) -> list[str]:
    """`--x.a.b 1 --x.c y` -> `--x {"a": {"b": 1}, "c": "y"}`. Raises ConfigError."""
    result: list[str | dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        flag, dot, keys = name.partition(".")
        if word == "--":
            result.extend([word, *words])
        elif not (word.startswith("--") and dot):
            result.append(word)
        else:
            if flag not in found:
                found[flag] = {}
                result.extend([flag, found[flag]])
            if not equals and (following := next(words, None)) is not None:
                equals, value = "=", following
            if not equals or not _put(found[flag], keys.split("."), value):
                raise ConfigError(f"{name} needs a value, and a key that is not given twice")
    for flag in found:
        if result.count(flag) > 1 or any(isinstance(word, str) and word.startswith(flag + "=") for word in result):
            raise ConfigError(f"{flag} is given both whole and key by key")
    return [word if isinstance(word, str) else json.dumps(word) for word in result]


def _put(place: dict[str, Any], keys: list[str], text: str) -> bool:
    """Store the JSON (or the plain text) at a path of keys; False when there is something already, or a key is empty."""
    *path, last = keys
    for key in path:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            return False
    if last in place or "" in keys:
        return False
    try:
        place[last] = json.loads(text)
    except (ValueError, RecursionError):
        place[last] = text
    return True
